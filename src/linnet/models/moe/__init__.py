"""Mixture of experts: Grok-1's transformer, trained and served."""
