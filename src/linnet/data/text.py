"""Bytes of text as packed windows of ids, made on the fly: byte b is id b + 3, and a document may end with id 1."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from linnet.data.batch import END, FIRST_BYTE, NO_DOCUMENT, PAD, Window
from linnet.data.holdout import Piece
from linnet.data.source import reading
from linnet.errors import UserError

MAP_FROM_BYTES = 64 << 20
"""One file this large is mapped, not read. A smaller one is read, so that editing it cannot disturb a run."""
HASH_BYTES = 1 << 20


class TextSplit:
    """Documents one after another, cut into windows of `sequence_len` tokens; the last window is padded.

    Holds the text once as bytes and two numbers a document; everything else is computed for the window asked for."""

    def __init__(
        self,
        text: UInt8[np.ndarray, " bytes"],
        sizes: Int64[np.ndarray, " documents"],
        ends: Bool[np.ndarray, " documents"],
        sequence_len: int,
    ) -> None:
        assert text.ndim == 1
        assert text.size == sizes.sum(), f"documents of {sizes.sum()} bytes in a text of {text.size}"
        self.sequence_len = sequence_len
        self._text = text
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes + ends)])
        """The token position at which each document starts, and the end of the last."""
        self._end_positions = self._starts[1:][ends] - 1
        """The token positions of the end ids: all other positions are bytes, in the order of the text."""

    @property
    def n_documents(self) -> int:
        return len(self._starts) - 1

    @property
    def n_bytes(self) -> int:
        return int(self._text.size)

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def n_windows(self) -> int:
        return -(-self.n_tokens // self.sequence_len)

    def raw(self) -> bytes:
        return self._text.tobytes()

    def window(self, i: int) -> Window:
        return self.stretch(i, 0, self.sequence_len)

    def stretch(self, i: int, start: int, stop: int) -> Window:
        assert 0 <= i < self.n_windows, f"window {i} of {self.n_windows}"
        assert 0 <= start < stop <= self.sequence_len
        first, length = i * self.sequence_len + start, stop - start
        last = min(first + length, self.n_tokens)
        n = last - first
        targets = np.full(length, PAD, np.int32)
        doc_ids = np.full(length, NO_DOCUMENT, np.int32)
        mask = np.zeros(length, np.float32)
        if n > 0:  # else all of it lies in the padding of the last window
            targets[:n] = self._tokens(first, last)
            doc_ids[:n] = self._documents(first, last)
            mask[:n] = 1
        return Window(targets, doc_ids, mask)

    def _tokens(self, first: int, last: int) -> Int32[np.ndarray, " n"]:
        # As many end ids as stand before a position, so many bytes fewer do.
        e0, e1 = np.searchsorted(self._end_positions, (first, last))
        ids = self._text[first - e0 : last - e1].astype(np.int32) + FIRST_BYTE
        if e0 == e1:
            return ids
        tokens = np.full(last - first, END, np.int32)
        is_byte = np.ones(last - first, bool)
        is_byte[self._end_positions[e0:e1] - first] = False
        tokens[is_byte] = ids
        return tokens

    def _documents(self, first: int, last: int) -> Int64[np.ndarray, " n"]:
        d0, d1 = np.searchsorted(self._starts, (first, last - 1), side="right") - 1
        lengths = np.diff(np.clip(self._starts[d0 : d1 + 2], first, last))
        return np.repeat(np.arange(d0, d1 + 1), lengths)

    def fingerprint(self) -> str:
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for numbers in (self._starts, self._end_positions):
            digest.update(numbers.size.to_bytes(8, "little") + numbers.astype("<i8").tobytes())
        for at in range(0, self._text.size, HASH_BYTES):
            digest.update(self._text[at : at + HASH_BYTES].data)
        return digest.hexdigest()


def open_text(pieces: Sequence[Piece], sequence_len: int) -> TextSplit:
    return TextSplit(
        _mapped(pieces[0]) if len(pieces) == 1 and pieces[0].size >= MAP_FROM_BYTES else _read(pieces),
        np.array([p.size for p in pieces], np.int64),
        np.array([p.ends for p in pieces], bool),
        sequence_len,
    )


def _mapped(piece: Piece) -> UInt8[np.ndarray, " bytes"]:
    with reading(piece.file.path):
        _check_whole(piece, piece.file.path.stat().st_size)
        return np.memmap(piece.file.path, np.uint8, "r", piece.start, (piece.size,))


def _read(pieces: Sequence[Piece]) -> UInt8[np.ndarray, " bytes"]:
    """All pieces in one array, read into place: no second copy of the text is ever held."""
    text = np.empty(sum(p.size for p in pieces), np.uint8)
    at = 0
    for piece in pieces:
        with reading(piece.file.path), open(piece.file.path, "rb") as file:
            file.seek(piece.start)
            _check_whole(piece, piece.start + file.readinto(text[at : at + piece.size].data))
        at += piece.size
    text.flags.writeable = False
    return text


def _check_whole(piece: Piece, available: int) -> None:
    if available < piece.stop:
        raise UserError(f"{piece.file.path} shrank while it was being read. Fix: start again when it is complete.")
