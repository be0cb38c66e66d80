"""Serving priors: the same loop as for tokens, whose tick is one step of denoising."""
