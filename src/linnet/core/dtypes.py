"""How many bits a weight is held in, by name: known without JAX, so that `--help` need not wait for it."""

from __future__ import annotations

from typing import Literal

Weights = Literal["float32", "bfloat16", "int8"]
WEIGHTS: tuple[Weights, ...] = ("float32", "bfloat16", "int8")
"""From most bits to fewest."""
