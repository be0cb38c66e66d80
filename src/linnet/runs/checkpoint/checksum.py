"""A checksum of an array that can be summed over its pieces, however it is cut.

No machine sees a whole leaf of a sharded state, and a state is read on other meshes than it was written on. So each
32-bit word of the array is multiplied by an odd weight that depends on its place alone, and the products are added
modulo 2**64: the sums of any pieces add up to the sum of the whole. A change of a single word is always found. Other
changes, blocks that trade places among them, pass with a chance of one in 2**32 in the worst case (only the highest
bits of words are wrong), and of one in 2**63 as a rule.

A weight is a product of one factor for each axis: so the sum of a box is a few products of matrices and vectors, and
faster than a CRC. Along the last axis, bytes are counted in words of four; where a box begins or ends within a word,
the missing bytes count as zeros, which add nothing.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jaxtyping import Array, UInt64

MODULUS = 2**64
_WORD = 4  # Bytes.
_SPAN = 1024  # Words of the last axis that share a factor, so that long axes need no long tables.
_BATCH = 65_536  # Words at a time: what is made of them stays in a core's cache.

Box = tuple[tuple[int, ...], np.ndarray]
"""A piece of an array: where its first element stands, and its content."""


def of_box(start: tuple[int, ...], content: np.ndarray) -> int:
    """The share of one box in the checksum of its array."""
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
    for axis in reversed(range(len(shape) - 1)):  # From the inside out: a vector for each row left over.
        sums = sums.reshape(-1, shape[axis]) @ _odd(axis, start[axis], shape[axis])
    return int(sums.sum(dtype=np.uint64))


def of_boxes(boxes: list[Box]) -> int:
    return sum(of_box(start, content) for start, content in boxes) % MODULUS


def of_held(array: Array) -> int:
    """Of all that this process holds of an array, each copy of a piece counted. Equal copies are looked at once."""
    held: dict[tuple[int, ...], int] = {}
    total = 0
    for shard in array.addressable_shards:
        start = start_of(shard)
        if start not in held:
            held[start] = of_box(start, np.asarray(shard.data))
        total += held[start]
    return total % MODULUS


def copies(array: Array) -> int:
    """How often each element is held, over all processes that hold the array."""
    piece = math.prod(array.sharding.shard_shape(array.shape))
    return len(array.sharding.device_set) * piece // max(1, array.size)


def start_of(shard: jax.Shard) -> tuple[int, ...]:
    return tuple(cut.start or 0 for cut in shard.index)


def _last_axis(first: int, count: int) -> UInt64[np.ndarray, " count"]:
    spans = range(first // _SPAN, (first + count - 1) // _SPAN + 1)
    weights = _odd(-1, spans[0], len(spans))[:, None] * _WITHIN
    return weights.reshape(-1)[first % _SPAN :][:count]


def _odd(axis: int, first: int, count: int) -> UInt64[np.ndarray, " count"]:
    """Factors without a pattern: the mixing of SplitMix64, of a counter."""
    x = np.arange(first, first + count, dtype=np.uint64) + np.uint64((axis + 3) << 48)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


_WITHIN = _odd(-2, 0, _SPAN)
