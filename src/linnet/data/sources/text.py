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


def open_text(spans: Sequence[FileSpan], sequence_len: int) -> PackedSplit:
    return PackedSplit(
        _map_span(spans[0]) if len(spans) == 1 and spans[0].size >= MAP_FROM_BYTES else _read_spans(spans),
        np.array([p.size for p in spans], np.int64),
        np.array([p.ends for p in spans], bool),
        sequence_len,
    )


def _map_span(span: FileSpan) -> UInt8[np.ndarray, " bytes"]:
    with reading(span.file.path):
        _check_complete(span, span.file.path.stat().st_size)
        return np.memmap(span.file.path, np.uint8, "r", span.start, (span.size,))


def _read_spans(spans: Sequence[FileSpan]) -> UInt8[np.ndarray, " bytes"]:
    """Read all spans into one array, without a second copy of the text."""
    text = np.empty(sum(p.size for p in spans), np.uint8)
    at = 0
    for span in spans:
        with reading(span.file.path), open(span.file.path, "rb") as file:
            file.seek(span.start)
            _check_complete(span, span.start + file.readinto(text[at : at + span.size].data))
        at += span.size
    text.flags.writeable = False
    return text


def _check_complete(span: FileSpan, available: int) -> None:
    if available < span.stop:
        raise UserError(f"{span.file.path} shrank while it was being read. Fix: start again when it is complete.")
