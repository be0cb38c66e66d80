"""Lower bounds of sampling settings, below which scores overflow. This module does not import JAX."""

from __future__ import annotations

MIN_TEMPERATURE = 1e-6
"""Lower bound of nonzero temperatures; 0 means greedy."""
MIN_REPETITION_PENALTY = 0.01
