"""Rows of vectors in memory-mapped shards, with a name for each row that is used in messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int64, Shaped

from linnet.core.errors import UserError, invalid
from linnet.data.sources.npy import map_npy


class VectorShard(Protocol):
    """The rows of one kind in one file; `shape` is that of a row."""

    @property
    def path(self) -> Path: ...
    @property
    def identity(self) -> str:
        """Distinguishes these rows from others of the same file."""
        ...

    @property
    def n_rows(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read_stored(self, rows: Int64[np.ndarray, " k"] | slice) -> Shaped[np.ndarray, "k ..."]:
        """Return rows in the dtype of the file."""
        ...

    def row_name(self, row: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class ArrayShard:
    """An array, memory-mapped from an .npy file or in memory."""

    path: Path
    identity: str
    array: Shaped[np.ndarray, "n ..."]
    display_name: str = ""
    """Location of the original rows, if this file was unpacked from another."""

    @property
    def n_rows(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[1:]

    def read_stored(self, rows: Int64[np.ndarray, " k"] | slice) -> Shaped[np.ndarray, "k ..."]:
        return self.array[rows]

    def row_name(self, row: int) -> str:
        return f"{self.display_name or self.path}, row {row}"


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Concatenation of shards, as one array of rows."""

    shards: tuple[VectorShard, ...]
    starts: Int64[np.ndarray, " shards_and_1"]

    @staticmethod
    def concatenate(shards: Sequence[VectorShard], what: str) -> Vectors:
        """Concatenate shards; raises if their widths differ, naming the first that does."""
        first = shards[0]
        for shard in shards:
            if shard.shape != first.shape:
                raise UserError(
                    f"the {what} embeddings in {shard.path} have the width {_format_shape(shard.shape)}, but those in {first.path} "
                    f"have {_format_shape(first.shape)}. Fix: embed all of them with one encoder, or leave the others out."
                )
        return Vectors(tuple(shards), np.cumsum([0, *(shard.n_rows for shard in shards)], dtype=np.int64))

    @property
    def n_rows(self) -> int:
        return int(self.starts[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shards[0].shape

    @property
    def width(self) -> int:
        return self.shape[-1]

    def read(self, rows: Int64[np.ndarray, " k"]) -> Float32[np.ndarray, "k ..."]:
        out = np.empty((len(rows), *self.shape), np.float32)
        which = np.searchsorted(self.starts, rows, side="right") - 1
        for shard in np.unique(which):
            positions = np.flatnonzero(which == shard)
            out[positions] = self.shards[shard].read_stored(rows[positions] - self.starts[shard])
        return out

    def row_name(self, row: int) -> str:
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.shards[shard].row_name(row - int(self.starts[shard]))


def open_npy(path: Path, identity: str, *, n_axes: int = 2) -> ArrayShard:
    """Memory-map an .npy file and check its header; the rows are validated by `validate_rows`."""
    array = map_npy(path)
    if array.ndim != n_axes or not all(array.shape[1:]):
        needs = f"an array of {'rows' if n_axes == 2 else 'rows of positions'} of numbers ({n_axes} axes)"
        raise invalid(f"the shape of {path}", array.shape, needs, "save one embedding per row")
    if array.dtype.kind != "f":
        raise invalid(f"the type of {path}", str(array.dtype), "float16, float32 or float64", "save it as one of those")
    return ArrayShard(path, identity, array)


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
