"""Prefix cache: states after prompt prefixes, looked up by content, with least-recently-used eviction.

Prefixes are multiples of the chunk length, so resuming from a cached state runs the same programs on the same values as a full
prefill, and the answer is bit-identical.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from linnet.core.pytree import n_bytes
from linnet.serve.state import UniqueBytes


class PrefixCache:
    def __init__(self, chunk_len: int, max_bytes: int) -> None:
        assert chunk_len > 0
        self._chunk_len, self._max_bytes = chunk_len, max_bytes
        self._states: OrderedDict[bytes, Any] = OrderedDict()
        self._usage = UniqueBytes()
        self.hits = self.misses = 0

    @property
    def n_bytes(self) -> int:
        return self._usage.total

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return one key per complete chunk: a hash of all tokens up to its end."""
        keys, digest = [], hashlib.sha256()
        for at in range(0, len(tokens) - len(tokens) % self._chunk_len, self._chunk_len):
            digest.update(np.asarray(tokens[at : at + self._chunk_len], "<u4").tobytes())
            keys.append(digest.digest())
        return keys

    def longest(self, keys: Sequence[bytes]) -> tuple[int, Any]:
        """Return the number of chunks in the longest cached prefix and the state after it, or (0, None)."""
        for n in range(len(keys), 0, -1):
            state = self._states.get(keys[n - 1])
            if state is not None:
                self._states.move_to_end(keys[n - 1])
                self.hits += 1
                return n, state
        if keys:
            self.misses += 1
        return 0, None

    def wants(self, n: int, of: int) -> bool:
        """Whether to keep the state after chunk `n` (from 1) of `of` chunks: the last one and every power of two, so that at least
        half of any shared prefix is found."""
        return self._max_bytes > 0 and (n == of or n & (n - 1) == 0)

    def add(self, key: bytes, state: Any) -> None:
        if key in self._states or n_bytes(state) > self._max_bytes:
            return
        self._states[key] = state
        self._usage.add(state)
        while self.n_bytes > self._max_bytes:
            self._usage.remove(self._states.popitem(last=False)[1])
