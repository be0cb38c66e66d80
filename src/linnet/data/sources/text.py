"""Plain text files: read into memory, or memory-mapped if there is one large file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from linnet.core.errors import UserError
from linnet.data.packed import PackedSplit
from linnet.data.sources.files import reading
from linnet.data.splits import FileSpan

MAP_FROM_BYTES = 64 << 20
"""One file of at least this size is memory-mapped. A smaller one is read, so that editing it cannot affect a run."""


def open_text(pieces: Sequence[FileSpan], sequence_len: int) -> PackedSplit:
    return PackedSplit(
        _map_span(pieces[0]) if len(pieces) == 1 and pieces[0].size >= MAP_FROM_BYTES else _read_spans(pieces),
        np.array([p.size for p in pieces], np.int64),
        np.array([p.ends for p in pieces], bool),
        sequence_len,
    )


def _map_span(piece: FileSpan) -> UInt8[np.ndarray, " bytes"]:
    with reading(piece.file.path):
        _check_complete(piece, piece.file.path.stat().st_size)
        return np.memmap(piece.file.path, np.uint8, "r", piece.start, (piece.size,))


def _read_spans(pieces: Sequence[FileSpan]) -> UInt8[np.ndarray, " bytes"]:
    """Read all pieces into one array in place, without a second copy of the text."""
    text = np.empty(sum(p.size for p in pieces), np.uint8)
    at = 0
    for piece in pieces:
        with reading(piece.file.path), open(piece.file.path, "rb") as file:
            file.seek(piece.start)
            _check_complete(piece, piece.start + file.readinto(text[at : at + piece.size].data))
        at += piece.size
    text.flags.writeable = False
    return text


def _check_complete(piece: FileSpan, available: int) -> None:
    if available < piece.stop:
        raise UserError(f"{piece.file.path} shrank while it was being read. Fix: start again when it is complete.")
