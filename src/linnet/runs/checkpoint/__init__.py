"""Checkpoints: written in the background, verified by checksums."""
