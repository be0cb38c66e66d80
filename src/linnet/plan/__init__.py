"""What a run would take on devices that are not here: programs compiled for them, read, and never run."""
