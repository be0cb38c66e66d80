"""The least that some settings of sampling may be: below, scores overflow, and nothing can be drawn. Known without JAX."""

from __future__ import annotations

MIN_TEMPERATURE = 1e-6
"""But for 0, which is greedy."""
MIN_REPETITION_PENALTY = 0.01
