"""Webdataset tars: the members of a sample share one name and have different suffixes.

One pass over the headers indexes the embeddings; rows are then read from the memory-mapped tar in any order.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import mmap
import os
from array import array
from collections import Counter
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Int64, Shaped

from linnet.core.errors import UserError
from linnet.core.files import parse_json
from linnet.data.sources.files import reading
from linnet.data.sources.image_readers import tar_members
from linnet.data.sources.npy import check_size, read_npy_header

HEADER_BYTES = 256
"""Enough for the header of any .npy of one vector; numpy pads it to 128 bytes or slightly more."""
CAPTION_ENDINGS = {"txt": "caption", "caption": "caption", "json": "json"}


@dataclasses.dataclass(frozen=True)
class TarShard:
    """The .npy members with one suffix, one per sample."""

    path: Path
    what: str
    identity: str
    mapped: mmap.mmap
    starts: Int64[np.ndarray, " n"]
    """Offset of each row's data, after its .npy header."""
    dtype: np.dtype
    shape: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def n_rows(self) -> int:
        return len(self.starts)

    def read_stored(self, rows: Int64[np.ndarray, " k"] | slice) -> Shaped[np.ndarray, "k D"]:
        starts = self.starts[rows]
        out = np.empty((len(starts), *self.shape), self.dtype)
        for i, start in enumerate(starts.tolist()):
            out[i] = np.frombuffer(self.mapped, self.dtype, self.shape[0], start)
        return out

    def row_name(self, row: int) -> str:
        return f"{self.path}, {self.keys[row]} ({self.what})"


@dataclasses.dataclass(frozen=True)
class TarCaptions:
    """Captions from the .txt, .caption or .json member of each sample, over several tars."""

    tars: tuple[TarShard, ...]
    spans: tuple[Int64[np.ndarray, "_ 3"], ...]
    """Offset and size in bytes of the text, and whether it is JSON."""
    key: str

    def read(self, rows: Int64[np.ndarray, " k"]) -> list[str]:
        starts = np.cumsum([0, *(tar.n_rows for tar in self.tars)])
        which = np.searchsorted(starts, rows, side="right") - 1
        return [self._one(int(i), int(row - starts[i])) for i, row in zip(which, rows, strict=True)]

    def _one(self, tar: int, row: int) -> str:
        start, size, is_json = self.spans[tar][row].tolist()
        text = self.tars[tar].mapped[start : start + size].decode("utf-8", "replace")
        if not is_json:
            return text.strip()
        try:
            return str(parse_json(text).get(self.key) or "")
        except (ValueError, AttributeError):
            return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TarPairs:
    image: TarShard
    text: TarShard
    captions: Int64[np.ndarray, "n 3"]
    left_out: Counter[str]
    warnings: list[str]


def open_tar(path: Path, image_endings: tuple[str, ...], text_endings: tuple[str, ...]) -> TarPairs:
    """Index a tar. Samples that lack one of the embeddings are excluded and counted; a tar without any is an error."""
    samples = _Samples(image_endings, text_endings)
    with reading(path), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise UserError(f"{path} is empty. Fix: download or create it again, or leave it out.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for info in tar_members(path):
            if info.isreg() and info.sparse is None:
                samples.add(info.name, info.offset_data, info.size)
    return samples.finish(path, mapped)


class _Samples:
    """Collects the member offsets of each sample in compact arrays, with one name per sample."""

    def __init__(self, image_endings: tuple[str, ...], text_endings: tuple[str, ...]) -> None:
        self._endings = {**dict.fromkeys(image_endings, "image"), **dict.fromkeys(text_endings, "text")}
        self._row_of: dict[str, int] = {}
        self._columns = {name: (array("q"), array("q")) for name in ("image", "text", "caption", "json")}
        self._seen: Counter[str] = Counter()

    def add(self, name: str, start: int, size: int) -> None:
        path = PurePosixPath(name)
        stem, _, ending = path.name.partition(".")
        what = self._endings.get(ending.lower()) or CAPTION_ENDINGS.get(ending.lower())
        self._seen[ending.lower()] += 1
        if what is None or not stem:
            return
        row = self._row_of.setdefault(str(path.parent / stem), len(self._row_of))
        starts, sizes = self._columns[what]
        for column, value in ((starts, start), (sizes, size)):
            column.extend([-1] * (row + 1 - len(column)))
            column[row] = value

    def finish(self, path: Path, mapped: mmap.mmap) -> TarPairs:
        n = len(self._row_of)
        starts = {name: _pad_column(columns[0], n) for name, columns in self._columns.items()}
        sizes = {name: _pad_column(columns[1], n) for name, columns in self._columns.items()}
        has = {name: starts[name] >= 0 for name in ("image", "text")}
        for name in has:
            if not has[name].any():
                raise self._missing_kind(path, name)
        complete = np.flatnonzero(has["image"] & has["text"])
        if not len(complete):
            raise UserError(
                f"no sample of {path} has both an image and a text embedding. Fix: give both the same name."
            )
        keys = list(self._row_of)
        left_out, warnings = Counter[str](), list[str]()
        for name, other in (("image", "text"), ("text", "image")):
            incomplete = np.flatnonzero(has[other] & ~has[name])
            if len(incomplete):
                left_out[f"no_{name}"] = len(incomplete)
                warnings.append(
                    f"{len(incomplete):,} samples of {path} have no {name} embedding and are left out, first {keys[incomplete[0]]}."
                )
        names = tuple(keys[i] for i in complete)
        shards = {}
        for name in ("image", "text"):
            # The set of rows depends on the suffixes of both kinds.
            identity = f"{name} {json.dumps(self._endings)}"
            shard = TarShard(path, name, identity, mapped, starts[name][complete], np.dtype(np.float32), (0,), names)
            shards[name] = _read_headers(shard, sizes[name][complete])
        plain = starts["caption"] >= 0
        captions = np.stack(
            [
                np.where(plain, starts["caption"], np.maximum(starts["json"], 0)),
                np.where(plain, sizes["caption"], np.maximum(sizes["json"], 0)),
                ~plain & (starts["json"] >= 0),
            ],
            axis=1,
        )[complete]
        return TarPairs(
            image=shards["image"], text=shards["text"], captions=captions, left_out=left_out, warnings=warnings
        )

    def _missing_kind(self, path: Path, name: str) -> UserError:
        wanted = ", ".join(f".{ending}" for ending, what in self._endings.items() if what == name)
        present = ", ".join(f".{ending}" for ending, _ in self._seen.most_common(6)) or "nothing"
        more = (
            "; if it contains images or captions to embed, run `linnet data embed` on it first"
            if {"jpg", "png", "webp", "txt", "jpeg"} & self._seen.keys()
            else ""
        )
        return UserError(
            f"{path} has no {name} embeddings ({wanted}); it has {present}. Fix: name the ending with --data.{name}-key{more}."
        )


def _pad_column(column: array[int], n: int) -> Int64[np.ndarray, " n"]:
    return np.concatenate([np.array(column, np.int64), np.full(n - len(column), -1, np.int64)])


def _read_headers(shard: TarShard, sizes: Int64[np.ndarray, " n"]) -> TarShard:
    """Read the header of each .npy; all must hold one vector of the same width and dtype."""
    dtype, width = np.dtype(np.float32), None
    offsets = np.empty(shard.n_rows, np.int64)
    for i, (start, size) in enumerate(zip(shard.starts.tolist(), sizes.tolist(), strict=True)):
        head = io.BytesIO(shard.mapped[start : start + min(size, HEADER_BYTES)])
        header = read_npy_header(head, shard.row_name(i))
        shape, own_dtype, n = header.shape, header.dtype, math.prod(header.shape)
        if width is None:
            dtype, width = own_dtype, n
        if (n, own_dtype) != (width, dtype) or max(shape, default=0) != n or not n or own_dtype.kind != "f":
            raise UserError(
                f"{shard.row_name(i)} is an array {shape} of {own_dtype}, but one vector of {width} floating-point numbers ({dtype}) "
                "is expected, as the first sample has. Fix: embed all samples with one encoder, or leave this one out."
            )
        check_size(header, size - header.offset, shard.row_name(i))
        offsets[i] = start + header.offset
    assert width is not None
    return dataclasses.replace(shard, starts=offsets, dtype=dtype, shape=(width,))
