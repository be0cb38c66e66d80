"""How many bits a weight is held in, by name: known without JAX, so that `--help` need not wait for it."""

from __future__ import annotations

from typing import Literal

WeightDtype = Literal["float32", "bfloat16", "int8"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("float32", "bfloat16", "int8")
"""From most bits to fewest."""
