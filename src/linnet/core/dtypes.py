"""Names of the weight storage dtypes. Does not import JAX, so that `--help` stays fast."""

from __future__ import annotations

from typing import Literal

WeightDtype = Literal["float32", "bfloat16", "int8"]
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("float32", "bfloat16", "int8")
"""In order of decreasing precision."""
