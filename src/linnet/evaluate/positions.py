"""Loss by position in the sequence, in bins, and whether longer context helps, with standard errors over sequences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

MAX_BINS = 16
SIGNIFICANT = 2.0
"""Standard errors that a difference must exceed to be significant."""
MIN_SEQUENCES = 2


def position_edges(length: int) -> list[int]:
    """Bin edges 0, 1, 2, 4, .. up to the length. Bins grow because context helps most at the start."""
    edges = [0, *(2**i for i in range(length.bit_length()) if 2**i < length), length]
    return edges if len(edges) <= MAX_BINS + 1 else [0, *edges[-MAX_BINS:]]


class PositionSums:
    """Accumulates sums of nats and of counted tokens per sequence and bin, for standard errors over sequences."""

    def __init__(self, length: int) -> None:
        self.edges = position_edges(length)
        self._bin_of = np.searchsorted(self.edges, np.arange(length), side="right") - 1
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def begin(self, n_rows: int) -> None:
        """Start a new batch of sequences."""
        shape = (n_rows, len(self.edges) - 1)
        self._rows.append((np.zeros(shape), np.zeros(shape)))

    def add(self, start: int, nats: Float64[np.ndarray, "B T"], counted: Float64[np.ndarray, "B T"]) -> None:
        """Add the positions from `start` on, of the current batch."""
        bins = self._bin_of[start : start + nats.shape[1]]
        for i in np.unique(bins):
            here = bins == i
            self._rows[-1][0][:, i] += (nats[:, here] * counted[:, here]).sum(axis=1)
            self._rows[-1][1][:, i] += counted[:, here].sum(axis=1)

    def finish(self) -> ByPosition:
        n_bin = len(self.edges) - 1
        nats = np.concatenate([rows[0] for rows in self._rows] or [np.zeros((0, n_bin))])
        counts = np.concatenate([rows[1] for rows in self._rows] or [np.zeros((0, n_bin))])
        used = counts.any(axis=1)
        return summarize(self.edges, nats[used], counts[used])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Change of the loss from an early bin to the last one.

    Both bins come from the same sequences, so the standard error is that of the paired difference.
    """

    early: int
    """Index of the early bin."""
    last: int
    nats: float
    """Loss of the early bin minus loss of the last bin: positive if context helps."""
    standard_error: float | None
    sequences: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByPosition:
    edges: list[int]
    nats: list[float]
    """Mean nats per token of each bin; NaN for bins without tokens."""
    standard_errors: list[float]
    change: Change | None

    def to_json(self) -> dict[str, Any]:
        return {
            "edges": self.edges,
            "loss": [_plain(x) for x in self.nats],
            "standard_error": [_plain(x) for x in self.standard_errors],
            **({} if self.change is None else {"change": dataclasses.asdict(self.change)}),
        }


def summarize(
    edges: list[int], nats: Float64[np.ndarray, "n bins"], counts: Float64[np.ndarray, "n bins"]
) -> ByPosition:
    """Return means over all tokens, and standard errors that treat each sequence as one observation."""
    n, totals = len(nats), counts.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = nats.sum(axis=0) / totals
        # The influence of a sequence on a ratio of sums (the delta method).
        influence = (nats - means * counts) / totals
    errors = _error(influence)
    chosen = compared_bins(edges, means.tolist())
    change = None
    if chosen is not None:
        early, last = chosen
        paired = float(_error(influence[:, early] - influence[:, last]))
        change = Change(
            early=early,
            last=last,
            nats=float(means[early] - means[last]),
            standard_error=_plain(paired),
            sequences=n,
        )
    return ByPosition(edges=edges, nats=means.tolist(), standard_errors=errors.tolist(), change=change)


def compared_bins(edges: Sequence[Any], losses: Sequence[Any]) -> tuple[int, int] | None:
    """Return the bins to compare: the first that starts at or after 1/16 of the last bin's start, and the last one.

    Only bins with a finite loss are used.
    """
    finite = [i for i, loss in enumerate(losses) if isinstance(loss, (int, float)) and math.isfinite(loss)]
    if len(finite) < 2:
        return None
    last = finite[-1]
    early = next(i for i in finite if edges[i] >= edges[last] / 16)
    return (finite[-2] if early == last else early), last


def _error(influence: np.ndarray) -> np.ndarray:
    n = len(influence)
    if n < MIN_SEQUENCES:
        return np.full(influence.shape[1:], np.nan)
    return np.asarray(np.sqrt(n / (n - 1) * (influence**2).sum(axis=0)))


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
