"""Optimizers, the moving average of weights, and LoRA adapters."""
