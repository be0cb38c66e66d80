"""The hidden size of a gated feed-forward, as Grok-1 reckons it."""

from __future__ import annotations

MULTIPLE = 8


def ffn_size(d_model: int, widening: float) -> int:
    """Two thirds of `widening` times the width, since a gated one has three matrices instead of two; rounded up."""
    size = int(widening * d_model) * 2 // 3
    return size + -size % MULTIPLE
