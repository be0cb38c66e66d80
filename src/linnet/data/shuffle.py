"""The order of training: a pure function of (seed, position in the stream), with every window once in every epoch."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Int64


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, n: int) -> Int64[np.ndarray, " n"]:
    """The order of n windows in one epoch. Made of raw Philox draws and a stable sort, because the streams of a bit
    generator are kept from one numpy to the next, while the methods of `Generator` are not."""
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False  # the cache hands the same array to everyone
    return order


def window_indices(seed: int, first: int, count: int, n: int) -> list[int]:
    """Which of n windows stand at positions first, first + 1, ... of the endless training stream."""
    assert n > 0
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), n)
        chosen += permutation(seed, epoch, n)[offset : offset + count - len(chosen)].tolist()
    return chosen


def host_slice(n_rows: int, host: int, n_hosts: int) -> range:
    """The rows of a batch that one of several hosts reads: every row falls to one host, and their numbers differ by one at most."""
    assert 0 <= host < n_hosts
    return range(n_rows * host // n_hosts, n_rows * (host + 1) // n_hosts)
