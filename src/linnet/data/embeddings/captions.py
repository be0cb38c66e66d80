"""Captions of rows, read on demand: from parquet by row group, from arrays, or from memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int64, Shaped

from linnet.core.errors import invalid
from linnet.data.sources.archives import open_parquet
from linnet.data.sources.files import reading


class Captions(Protocol):
    def read(self, rows: Int64[np.ndarray, " k"]) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class ArrayCaptions:
    """Strings in consecutive arrays, memory-mapped or in memory."""

    arrays: tuple[Shaped[np.ndarray, " n"], ...]

    @functools.cached_property
    def _starts(self) -> Int64[np.ndarray, " arrays_and_1"]:
        return np.cumsum([0, *map(len, self.arrays)], dtype=np.int64)

    def read(self, rows: Int64[np.ndarray, " k"]) -> list[str]:
        which = np.searchsorted(self._starts, rows, side="right") - 1
        return [str(self.arrays[i][row - self._starts[i]]) for i, row in zip(which, rows, strict=True)]


class ParquetCaptions:
    """Captions of a parquet column. Decodes one row group at a time and caches the last, because reads are often adjacent."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self._column = column
        self._groups: list[tuple[Path, int]] = []
        starts = [0]
        self.sizes: list[int] = []
        """Rows of each file."""
        for path in paths:
            with reading(path), open_parquet(path) as parquet:
                if column not in parquet.schema_arrow.names:
                    names = ", ".join(parquet.schema_arrow.names)
                    raise invalid("data.caption_key", column, f"a column of {path} ({names})", "name one of them")
                self.sizes.append(parquet.metadata.num_rows)
                for group in range(parquet.metadata.num_row_groups):
                    self._groups.append((path, group))
                    starts.append(starts[-1] + parquet.metadata.row_group(group).num_rows)
        self._starts = np.array(starts, np.int64)
        self._cached: tuple[int, list[str]] = (-1, [])

    def read(self, rows: Int64[np.ndarray, " k"]) -> list[str]:
        which = np.searchsorted(self._starts, rows, side="right") - 1
        out = [""] * len(rows)
        for i in np.argsort(which, kind="stable"):
            group = int(which[i])
            out[i] = self._group(group)[int(rows[i] - self._starts[group])]
        return out

    def _group(self, group: int) -> list[str]:
        if self._cached[0] != group:
            path, number = self._groups[group]
            with reading(path), open_parquet(path) as parquet:
                values = parquet.read_row_group(number, columns=[self._column]).column(0).to_pylist()
            self._cached = (group, ["" if value is None else str(value) for value in values])
        return self._cached[1]
