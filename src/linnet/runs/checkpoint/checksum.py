"""An array checksum that is additive over shards, independent of how the array is sharded.

No process holds a complete leaf of a sharded state, and a checkpoint may be read on another mesh than it was written on. So
each 32-bit word of the array is multiplied by an odd weight that depends only on its position, and the products are added
modulo 2**64: the sums of the shards add up to the sum of the array. A change of a single word is always detected. Other
changes, including swapped blocks, go undetected with probability 2**-32 in the worst case (only the highest bits of words
are wrong), and 2**-63 in general.

A weight is a product of one factor per axis, so the sum of a box takes a few matrix-vector products and is faster than a
CRC. Along the last axis, bytes are grouped into 4-byte words; where a box begins or ends within a word, the missing bytes
count as zeros, which add nothing.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jaxtyping import Array, UInt64

MODULUS = 2**64
_WORD = 4  # Bytes.
_SPAN = 1024  # Words of the last axis that share a factor, which keeps the tables short.
_BATCH = 65_536  # Words at a time, so that intermediates stay in a core's cache.

Box = tuple[tuple[int, ...], np.ndarray]
"""A piece of an array: the index of its first element, and its content."""


def of_box(start: tuple[int, ...], content: np.ndarray) -> int:
    """Contribution of one box to the checksum of its array."""
    if content.size == 0:
        return 0
    start, shape = start or (0,), content.shape or (1,)
    rows = np.ascontiguousarray(content).reshape(-1, shape[-1]).view(np.uint8)
    at, before = divmod(start[-1] * content.itemsize, _WORD)
    after = -(before + rows.shape[1]) % _WORD
    if before or after:
        rows = np.pad(rows, ((0, 0), (before, after)))
    words = rows.view("<u4")
    sums = np.zeros(len(words), np.uint64)
    width = min(_BATCH, words.shape[1])
    for left in range(0, words.shape[1], width):
        across = words[:, left : left + width]
        weights = _last_axis(at + left, across.shape[1])
        height = max(1, _BATCH // width)
        for top in range(0, len(words), height):
            some = slice(top, top + height)
            sums[some] += np.einsum("rw,w->r", across[some], weights, dtype=np.uint64, casting="unsafe")
    for axis in reversed(range(len(shape) - 1)):  # From the innermost axis outwards.
        sums = sums.reshape(-1, shape[axis]) @ _odd(axis, start[axis], shape[axis])
    return int(sums.sum(dtype=np.uint64))


def of_boxes(boxes: list[Box]) -> int:
    return sum(of_box(start, content) for start, content in boxes) % MODULUS


def of_addressable(array: Array) -> int:
    """Sum over all addressable shards of an array, counting every replica; the sum of a replicated shard is computed once."""
    sums: dict[tuple[int, ...], int] = {}
    total = 0
    for shard in array.addressable_shards:
        start = start_of(shard)
        if start not in sums:
            sums[start] = of_box(start, np.asarray(shard.data))
        total += sums[start]
    return total % MODULUS


def copies(array: Array) -> int:
    """Number of replicas of each element, over all devices of all processes."""
    piece = math.prod(array.sharding.shard_shape(array.shape))
    return len(array.sharding.device_set) * piece // max(1, array.size)


def start_of(shard: jax.Shard) -> tuple[int, ...]:
    return tuple(axis.start or 0 for axis in shard.index)


def _last_axis(first: int, count: int) -> UInt64[np.ndarray, " count"]:
    spans = range(first // _SPAN, (first + count - 1) // _SPAN + 1)
    weights = _odd(-1, spans[0], len(spans))[:, None] * _WITHIN
    return weights.reshape(-1)[first % _SPAN :][:count]


def _odd(axis: int, first: int, count: int) -> UInt64[np.ndarray, " count"]:
    """Pseudorandom odd factors: a counter mixed by SplitMix64."""
    x = np.arange(first, first + count, dtype=np.uint64) + np.uint64((axis + 3) << 48)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


_WITHIN = _odd(-2, 0, _SPAN)
