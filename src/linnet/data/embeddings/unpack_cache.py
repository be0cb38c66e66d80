"""Unpack parquet columns and .npz arrays, which do not support random access, once into the cache, and memory-map them there.

One block of rows is in memory at a time. The cache key is the path, size and modification time, so a changed file is unpacked
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from linnet.core.errors import UserError, invalid
from linnet.core.files import cache_folder
from linnet.data.sources.archives import open_parquet, open_zip
from linnet.data.sources.files import reading, writing
from linnet.data.sources.npy import map_npy
from linnet.data.sources.unpack_budget import UnpackBudget

VERSION = 1
ROWS = 1024
COPY_BYTES = 1 << 20

Write = Callable[[bytes], None]


def unpack_column(path: Path, column: str, n_rows: int) -> tuple[Path, Shaped[np.ndarray, "n ..."]]:
    """Unpack a column of lists of floats as [n, width]. A null becomes a row of NaN, which `validate_rows` excludes and reports."""
    unpacked = _cache_path(path, column)
    if not unpacked.exists():
        with reading(path), open_parquet(path) as parquet, _atomic_writer(unpacked) as write:
            row, width = 0, None
            for batch in parquet.iter_batches(ROWS, columns=[column]):
                for values in _read_lists(batch.column(0)):
                    known = next((len(value) for value in values if value is not None), None)
                    if width is None:
                        width = known
                        if width is None:
                            raise UserError(
                                f"{path}: the first {len(values)} rows of {column} are null. Fix: leave them out."
                            )
                        write(_header((n_rows, width)))
                    odd = next((i for i, v in enumerate(values) if v is not None and len(v) != width), None)
                    if odd is not None:
                        raise UserError(
                            f"{path}, row {row + odd}: {column} has the width {len(values[odd])}, but {width} before. Fix: embed "
                            "all rows with one encoder, or leave this one out."
                        )
                    missing = np.full(width, np.nan, np.float32)
                    block = np.stack([missing if value is None else value for value in values])
                    with np.errstate(over="ignore"):
                        converted = block.astype(np.float32)
                    _check_overflow(block, converted, row, f"{path}, row {{}}: {column}")
                    write(converted.tobytes())
                    row += len(values)
            if width is None:
                raise UserError(f"{path} has no rows. Fix: leave it out.")
    return unpacked, map_npy(unpacked)


def unpack_npz(path: Path, array: str, limit_gb: float | None = None) -> tuple[Path, Shaped[np.ndarray, "n ..."]]:
    """Unpack one array. `limit_gb` is the maximum unpacked size, see `UnpackBudget`."""
    unpacked = _cache_path(path, array)
    if not unpacked.exists():
        with (
            reading(path),
            open_zip(path) as archive,
            archive.open(f"{array}.npy") as stored,
            _atomic_writer(unpacked) as write,
        ):
            budget = UnpackBudget(path, path.stat().st_size, limit_gb, "--data.max-unpacked-gb")
            budget.claim(archive.getinfo(f"{array}.npy").file_size)
            while block := stored.read(COPY_BYTES):
                budget.spend(len(block))
                write(block)
    return unpacked, map_npy(unpacked)


def list_arrays(path: Path) -> list[str]:
    with reading(path), open_zip(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _read_lists(column: Any) -> Iterator[list[Any]]:
    """Yield rows as arrays or None; raises if the column is not a list of floats."""
    import pyarrow as pa

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not pa.types.is_floating(kind.value_type):
        raise invalid(
            "the type of the column of embeddings", str(kind), "a list of floating-point numbers", "name another"
        )
    # A null inside a row becomes NaN.
    yield [value.values.to_numpy(zero_copy_only=False) if value.is_valid else None for value in column]


def _check_overflow(values: np.ndarray, converted: np.ndarray, first: int, where: str) -> None:
    bad = np.flatnonzero((np.isfinite(values) & ~np.isfinite(converted)).any(axis=1))
    if bad.size:
        raise UserError(
            f"{where.format(first + bad[0])} contains a number too large for float32 (beyond 3.4e38). Fix: scale the embeddings, or "
            "leave this row out."
        )


def _cache_path(path: Path, what: str) -> Path:
    with reading(path):
        info = path.stat()
    key = [VERSION, str(path.absolute()), what, info.st_size, info.st_mtime_ns, info.st_ino]
    return cache_folder() / "pairs" / "unpacked" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"


@contextlib.contextmanager
def _atomic_writer(path: Path) -> Iterator[Write]:
    """Yield a function that appends to a file, which gets its final name when it is complete.

    Only errors of writing are converted here, unlike in `atomic_file`, because the caller reads another file meanwhile.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    fix = "free some space there, or set XDG_CACHE_HOME to another folder"
    with writing(path, fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(part, "wb")  # noqa: SIM115

    def write(data: bytes) -> None:
        with writing(path, fix):
            file.write(data)

    try:
        with contextlib.closing(file):
            yield write
            with writing(path, fix):
                file.flush()
        with writing(path, fix):
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def _header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()
