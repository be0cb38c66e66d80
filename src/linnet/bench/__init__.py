"""`linnet bench`: speed and memory benchmarks, each run in its own process."""
