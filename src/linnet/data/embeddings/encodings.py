"""Token encodings of captions, stored beside the embeddings: text_encodings/text_encodings_N.npy, one file per shard.

A file is an array [captions, positions, width] of float16 (or float32); positions after a caption's last token are all zeros. Files
are memory-mapped, so a training batch reads its own rows only. A caption takes positions x width x 2 bytes: 24 KB with the built-in
encoder (48 x 256), 118 KB with ViT-L/14 (77 x 768).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.sources import FOLDERS
from linnet.data.encoders.encoder import Encoder
from linnet.data.npy_writer import RowWriter

EncodingType = Literal["float16", "float32", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    dtype: EncodingType = "float16"
    length: int = 0
    """Positions kept of each caption; 0 with `none`."""

    def identity(self) -> dict[str, Any]:
        """Return the settings as plain values; empty without encodings, to match folders made before encodings existed."""
        return {} if self.dtype == "none" else {"text_encodings": self.dtype, "text_len": self.length}


NO_ENCODINGS = EncodingSettings(dtype="none")


def encoding_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in (out / FOLDERS["encodings"]).glob("*.npy"))


def choose_encodings(encoder: Encoder, dtype: EncodingType | Literal["auto"], length: int | None) -> EncodingSettings:
    """Resolve and check the settings. `auto` is float16, or no encodings if the encoder has none. Without `length`: all positions."""
    if dtype == "auto":
        dtype = "float16" if encoder.text_len else "none"
    if dtype == "none":
        if length is not None:
            raise invalid("--text-len", length, "omitted if no token encodings are written", "leave it out")
        return NO_ENCODINGS
    if not encoder.text_len:
        encoder.encode_texts([""])  # raises the reason
    if length is not None and not 1 <= length <= encoder.text_len:
        needs = f"from 1 to {encoder.text_len}, the positions of {encoder.name}"
        raise invalid("--text-len", length, needs, f"use {encoder.text_len}")
    return EncodingSettings(dtype=dtype, length=length or encoder.text_len)


class CaptionShard:
    """Embeds the captions of one shard and writes their token encodings incrementally."""

    def __init__(self, encoder: Encoder, settings: EncodingSettings, path: Path) -> None:
        self._encoder, self._settings, self._path = encoder, settings, path
        self._writer: RowWriter | None = None

    def embed(self, captions: Sequence[str]) -> Float32[np.ndarray, "n D"]:
        if self._settings.dtype == "none":
            return self._encoder.embed_texts(captions)
        embeds, encodings = self._encoder.encode_texts(captions)
        kept = encodings[:, : self._settings.length]
        dtype = np.dtype(self._settings.dtype)
        if np.abs(kept).max(initial=0.0) > np.finfo(dtype).max:
            raise UserError(
                f"{self._encoder.name} gave a token encoding that {dtype} cannot represent. Fix: use --text-encodings float32."
            )
        if self._writer is None:
            self._writer = RowWriter(self._path, kept.shape[1:], dtype)
        self._writer.add(kept)
        return embeds

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.finish()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()


@contextmanager
def open_caption_shard(encoder: Encoder, settings: EncodingSettings, out: Path, number: int) -> Iterator[CaptionShard]:
    """Open a `CaptionShard`; an incomplete file is removed if the block ends before `finish`."""
    name = FOLDERS["encodings"]
    shard = CaptionShard(encoder, settings, out / name / f"{name}_{number}.npy")
    try:
        yield shard
    finally:
        shard.discard()
