"""Consecutive documents packed into windows of ids, built on demand: the implementation of `Split`.

Content is stored without EOS ids, and bytes are stored as they are (id b + 3): a text file needs no copy, an image one byte per
value.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64, Shaped

from linnet.core.special_tokens import EOS, FIRST_BYTE, PAD
from linnet.data.batch import NO_DOCUMENT, Window

HASH_BYTES = 1 << 20


class Content(Protocol):
    """An array that may be spread over several files."""

    @property
    def size(self) -> int: ...
    def __getitem__(self, at: slice, /) -> Shaped[np.ndarray, " n"]: ...


class ConcatArray:
    """Concatenation of several arrays; slicing touches only the parts it needs."""

    def __init__(self, parts: Sequence[Shaped[np.ndarray, " _"]]) -> None:
        self._parts = [part for part in parts if part.size]
        self._starts = np.concatenate([[0], np.cumsum([part.size for part in self._parts], dtype=np.int64)])
        self._dtype = parts[0].dtype if parts else np.dtype(np.uint8)

    @property
    def size(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, at: slice, /) -> Shaped[np.ndarray, " n"]:
        start, stop, _ = at.indices(self.size)
        if start >= stop:
            return np.zeros(0, self._dtype)
        first, last = np.searchsorted(self._starts, (start, stop - 1), side="right") - 1
        slices = [
            self._parts[i][max(start - int(self._starts[i]), 0) : stop - int(self._starts[i])]
            for i in range(first, last + 1)
        ]
        return slices[0] if len(slices) == 1 else np.concatenate(slices)


class PackedSplit:
    """Documents split into windows of `sequence_len` tokens; the last window is padded."""

    def __init__(
        self,
        content: Content,
        sizes: Int64[np.ndarray, " documents"],
        ends: Bool[np.ndarray, " documents"],
        sequence_len: int,
        *,
        first_id: int = FIRST_BYTE,
        eos_id: int = EOS,
        n_bytes: int | None = None,
        n_words: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        assert content.size == sizes.sum(), f"documents of {sizes.sum()} tokens in a content of {content.size}"
        self.sequence_len, self.eos_id, self.n_words = sequence_len, eos_id, n_words
        self.bos_id: int | None = eos_id
        self.n_bytes = content.size if n_bytes is None else n_bytes
        self._content, self._first_id, self._fingerprint = content, first_id, fingerprint
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes + ends)])
        """Token position at which each document starts, and the end of the last."""
        self._eos_positions = self._starts[1:][ends] - 1
        """Token positions of the EOS ids; all other positions are content, in order."""

    @property
    def n_documents(self) -> int:
        return len(self._starts) - 1

    @property
    def n_tokens(self) -> int:
        return max(0, int(self._starts[-1]) - self._n_unpredicted)

    @property
    def _n_unpredicted(self) -> int:
        """1 without a BOS id: nothing precedes the very first token, so it is an input but not a target."""
        return int(self.bos_id is None)

    def with_bos(self, bos_id: int | None) -> PackedSplit:
        """Return the same content for a model whose sequences begin with this BOS id.

        None: a sequence begins with the token before its first target, which is the last token of the previous sequence.
        """
        changed = copy.copy(self)
        changed.bos_id = bos_id
        return changed

    def first_input(self, i: int) -> int:
        """Return the token before the first target of window i."""
        if self.bos_id is not None:
            return self.bos_id
        return int(self._tokens(i * self.sequence_len, i * self.sequence_len + 1)[0])

    @property
    def n_windows(self) -> int:
        return -(-self.n_tokens // self.sequence_len)

    def content(self, start: int, stop: int) -> Shaped[np.ndarray, " n"]:
        return self._content[start:stop]

    def window(self, i: int) -> Window:
        return self.slice(i, 0, self.sequence_len)

    def slice(self, i: int, start: int, stop: int) -> Window:
        assert 0 <= i < self.n_windows, f"window {i} of {self.n_windows}"
        assert 0 <= start < stop <= self.sequence_len
        first, length = self._n_unpredicted + i * self.sequence_len + start, stop - start
        last = min(first + length, int(self._starts[-1]))
        n = last - first
        targets = np.full(length, PAD, np.int32)
        doc_ids = np.full(length, NO_DOCUMENT, np.int32)
        mask = np.zeros(length, np.float32)
        if n > 0:  # otherwise the slice is entirely padding of the last window
            targets[:n] = self._tokens(first, last)
            doc_ids[:n] = self._documents(first, last)
            mask[:n] = 1
        return Window(targets, doc_ids, mask)

    def _tokens(self, first: int, last: int) -> Int32[np.ndarray, " n"]:
        # A content position is the token position minus the number of EOS ids before it.
        e0, e1 = np.searchsorted(self._eos_positions, (first, last))
        ids = self._content[first - int(e0) : last - int(e1)].astype(np.int32) + self._first_id
        if e0 == e1:
            return ids
        tokens = np.full(last - first, self.eos_id, np.int32)
        is_content = np.ones(last - first, bool)
        is_content[self._eos_positions[e0:e1] - first] = False
        tokens[is_content] = ids
        return tokens

    def _documents(self, first: int, last: int) -> Int64[np.ndarray, " n"]:
        d0, d1 = np.searchsorted(self._starts, (first, last - 1), side="right") - 1
        lengths = np.diff(np.clip(self._starts[d0 : d1 + 2], first, last))
        return np.repeat(np.arange(d0, d1 + 1), lengths)

    def fingerprint(self) -> str:
        return self._fingerprint or self._digest

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for positions in (self._starts, self._eos_positions):
            digest.update(positions.size.to_bytes(8, "little") + positions.astype("<i8").tobytes())
        for at in range(0, self._content.size, HASH_BYTES):
            digest.update(np.ascontiguousarray(self._content[at : at + HASH_BYTES]).data)
        return digest.hexdigest()
