"""Resource estimates for hardware you do not have: programs are compiled for it and analyzed, but not run."""
