"""Checkpoints and settings of DALLE2-pytorch."""
