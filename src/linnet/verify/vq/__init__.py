"""Verification of the `vq` family: files of transformer_vq and its checkpoints."""
