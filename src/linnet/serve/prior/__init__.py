"""Serving priors with the same engine loop as token models; a tick is one denoising step."""
