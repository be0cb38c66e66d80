"""Hidden size of a gated feed-forward layer, computed as in Grok-1."""

from __future__ import annotations

MULTIPLE = 8


def ffn_size(d_model: int, widening: float) -> int:
    """Return 2/3 of `widening` times the width, because a gated layer has three matrices instead of two; rounded up."""
    size = int(widening * d_model) * 2 // 3
    return size + -size % MULTIPLE
