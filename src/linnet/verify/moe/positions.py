"""Comparison of models with routers: if two experts are equally likely within rounding, either choice is correct.

Letters: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from linnet.verify.compare import Check, add_note, compare

BFLOAT16 = 0.04
"""Difference between the reference's own compiled and uncompiled runs in bfloat16, measured with `MEASURED_LAYERS` layers."""
MEASURED_LAYERS = 2
TIE = {"bf16": 0.01, "f32": 5e-6, "f32pure": 5e-6}
"""Probabilities closer than this are equal within rounding; for bf16, at the measured depth."""
MAX_EXCLUDED = 0.5
"""Maximum fraction of positions that may be excluded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPosition:
    check: Check
    diverged: Bool[np.ndarray, "B T"]
    """Positions where another expert was chosen."""


def growth(depth: Any) -> Any:
    """Return the growth of bfloat16 rounding with depth.

    Every layer adds independent rounding to the residual stream, so the sum grows with the square root of their number. (bfloat16
    against float32 on random models of the tiny sizes: .006, .008, .011, .013, .020 of the largest logit with 1, 2, 4, 8 and 16
    layers.)
    """
    return np.sqrt(np.maximum(1.0, np.asarray(depth) / MEASURED_LAYERS))


def bfloat16_bound(depth: int) -> float:
    """Return the bound for a tensor that is computed after `depth` layers."""
    return BFLOAT16 * float(growth(depth))


def close_ranks(
    probability: Float[np.ndarray, "*L B T E"], experts_per_token: int, prefix: str, depth: Any = MEASURED_LAYERS
) -> Bool[np.ndarray, "*L B T"]:
    """Return where the last chosen and the first other expert are about equally likely. `depth`: number of layers before each."""
    if experts_per_token >= probability.shape[-1]:
        return np.zeros(probability.shape[:-1], bool)
    falling = -np.sort(-probability, axis=-1)
    return falling[..., experts_per_token - 1] - falling[..., experts_per_token] < _tie(prefix, depth)


def near_tie(
    probability: Float[np.ndarray, "*L B T E"], experts_per_token: int, prefix: str, depth: Any = MEASURED_LAYERS
) -> Bool[np.ndarray, "*L B T"]:
    """Return where either choice is correct and they lead to different outputs.

    An expert whose probability is near the rounding error contributes so little that the bound covers either choice.
    """
    close = close_ranks(probability, experts_per_token, prefix, depth)
    last = -np.sort(-probability, axis=-1)[..., experts_per_token - 1]
    return close & (last >= _tie(prefix, depth))


def _tie(prefix: str, depth: Any) -> Any:
    return TIE[prefix] * (growth(depth) if prefix == "bf16" else 1.0)


def compare_by_position(
    name: str, got: np.ndarray, want: np.ndarray, tolerance: float, tie: Bool[np.ndarray, "B T"]
) -> ByPosition:
    """Compare arrays [B, T, ...] up to ties.

    A position that differs at a tie is excluded, and so are later positions of its row, which attend to it, if they exceed the
    tolerance.
    """
    none = np.zeros(want.shape[:2], bool)
    if got.shape != want.shape or not np.isfinite(want).all() or not np.isfinite(got).all():
        return ByPosition(check=compare(name, got, want, tolerance), diverged=none)
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    error = difference.max(axis=tuple(range(2, want.ndim)), initial=0.0) / max(float(np.abs(want).max()), 1e-30)
    beyond = error > tolerance
    diverged = tie & beyond
    excluded = np.maximum.accumulate(diverged, axis=1) & beyond
    if excluded.mean() > MAX_EXCLUDED:
        return ByPosition(check=compare(name, got, want, tolerance), diverged=none)
    expand = excluded.reshape(*excluded.shape, *(1,) * (want.ndim - 2))
    check = compare(name, np.where(expand, want, got), want, tolerance)
    if excluded.any():
        note = f"{int(excluded.sum())} of {excluded.size} positions excluded: a router's choice is within rounding of a tie"
        check = add_note(check, note)
    return ByPosition(check=check, diverged=diverged)
