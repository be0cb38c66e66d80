"""Optimizers, EMA of the weights, and LoRA adapters."""
