"""Mixture-of-experts transformer with the architecture of Grok-1: training and serving."""
