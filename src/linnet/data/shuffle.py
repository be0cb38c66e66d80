"""The training order: a pure function of (seed, position in the stream), with every window once per epoch."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Int64


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, n: int) -> Int64[np.ndarray, " n"]:
    """Return the order of n windows in one epoch.

    Uses raw Philox draws and a stable sort, because numpy keeps the streams of bit generators stable across versions, but not the
    methods of `Generator`.
    """
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False  # the cache returns the same array to every caller
    return order


def window_indices(seed: int, first: int, count: int, n: int) -> list[int]:
    """Return which of n windows are at positions first, first + 1, ... of the endless training stream."""
    assert n > 0
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), n)
        chosen += permutation(seed, epoch, n)[offset : offset + count - len(chosen)].tolist()
    return chosen


def host_slice(n_rows: int, host: int, n_hosts: int) -> range:
    """Return the rows of a batch that one host reads. Every row belongs to one host, and the counts differ by at most one."""
    assert 0 <= host < n_hosts
    return range(n_rows * host // n_hosts, n_rows * (host + 1) // n_hosts)
