"""Safe reading of untrusted .npy arrays: the header is parsed without Python's parser, and no pickle is ever loaded."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Float32, Shaped

from linnet.core.errors import UserError
from linnet.data.sources.files import reading

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000
"""numpy's own bound; the header of a plain array has at most a few hundred bytes."""
MAX_AXES = 32
MAX_BYTES = 1 << 60

_ENTRY = r"""\s*(?:'(?P<k{0}>\w+)'|"(?P<q{0}>\w+)")\s*:\s*
    (?:'(?P<t{0}>[^'\\]*)'|"(?P<u{0}>[^"\\]*)"|(?P<b{0}>True|False)|\((?P<s{0}>[\dL,\s]*)\))\s*"""
_HEADER = re.compile(r"\{" + ",".join(_ENTRY.format(i) for i in range(3)) + r",?\s*\}\s*", re.VERBOSE)
_DTYPE = re.compile(r"[<>|=]?[A-Za-z?]\d{0,9}(\[\w{1,8}\])?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NpyHeader:
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype
    offset: int
    """Bytes before the data."""

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(file: IO[bytes], where: str) -> NpyHeader:
    """Read and check the header only. `where` names the array in the error message."""
    start = file.read(8)
    if start[:6] != MAGIC:
        raise _invalid(where, "it does not start as one" if start else "it is empty")
    version = start[6] if len(start) == 8 else 0
    if version not in (1, 2, 3):
        raise _invalid(where, "its version is unknown")
    width = 2 if version == 1 else 4
    size = int.from_bytes(file.read(width), "little")
    if size > MAX_HEADER:
        raise _invalid(where, f"its header claims {size:,} bytes")
    text = file.read(size)
    if len(text) < size:
        raise _invalid(where, "it is truncated")
    return _parse_header(text.decode("latin-1"), where, 8 + width + size)


def _parse_header(text: str, where: str, offset: int) -> NpyHeader:
    match = _HEADER.fullmatch(text)
    if not match:
        raise _invalid(where, "its header is damaged, or it is not a plain array")
    entries: dict[str, tuple[str, str]] = {}
    for i in range(3):
        key = match[f"k{i}"] or match[f"q{i}"]
        kind = next(kind for kind in "tubs" if match[f"{kind}{i}"] is not None)
        entries[key] = (kind, match[f"{kind}{i}"])
    descr, order, shape = (entries.get(name, ("", "")) for name in ("descr", "fortran_order", "shape"))
    if descr[0] not in ("t", "u") or order[0] != "b" or shape[0] != "s":
        raise _invalid(where, "its header is damaged, or it is not a plain array")
    return NpyHeader(
        shape=_parse_shape(shape[1], where),
        fortran_order=order[1] == "True",
        dtype=_parse_dtype(descr[1], where),
        offset=offset,
    )


def _parse_shape(text: str, where: str) -> tuple[int, ...]:
    sizes = [word.strip().removesuffix("L") for word in text.split(",")]
    if sizes[-1] == "":  # after a trailing comma, or an empty tuple
        sizes.pop()
    if len(sizes) > MAX_AXES or not all(size.isascii() and size.isdigit() and len(size) <= 18 for size in sizes):
        raise _invalid(where, "its shape is damaged")
    return tuple(int(size) for size in sizes)


def _parse_dtype(name: str, where: str) -> np.dtype:
    try:
        dtype = np.dtype(name) if _DTYPE.fullmatch(name) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None:
        raise _invalid(where, f"its type {name[:40]!r} is unknown")
    if dtype.hasobject:
        raise UserError(f"{where} is pickled, which can run code when read. Fix: save it as plain numbers.")
    return dtype


def map_npy(path: Path) -> Shaped[np.ndarray, ...]:
    """Memory-map an .npy file."""
    with reading(path), open(path, "rb") as file:
        header = read_npy_header(file, str(path))
        check_size(header, os.fstat(file.fileno()).st_size - header.offset, str(path))
        order = "F" if header.fortran_order else "C"
        if not header.n_bytes:  # an empty file section cannot be mapped
            return np.zeros(header.shape, header.dtype, order)
        return np.memmap(file, header.dtype, "r", header.offset, header.shape, order)


def as_float32(values: Shaped[np.ndarray, ...], where: str) -> Float32[np.ndarray, ...]:
    """Convert to float32; raises if a finite value overflows."""
    with np.errstate(over="ignore"):
        out = np.asarray(values, np.float32)
    if values.dtype.kind == "f" and (np.isfinite(values) & ~np.isfinite(out)).any():
        raise UserError(
            f"{where} contains numbers too large for float32 (beyond 3.4e38). Fix: scale them, or embed again."
        )
    return out


def check_size(header: NpyHeader, n_bytes: int, where: str) -> None:
    """Check that the array fits into the available `n_bytes`, and into numpy's limits."""
    if math.prod(max(n, 1) for n in header.shape) * max(header.dtype.itemsize, 1) > MAX_BYTES:
        raise _invalid(where, "its shape is damaged")
    if header.n_bytes > n_bytes:
        raise UserError(
            f"{where} is truncated: {n_bytes:,} bytes, but its shape {header.shape} of {header.dtype} needs {header.n_bytes:,}. "
            "Fix: create or download it again, or leave it out."
        )


def _invalid(where: str, reason: str) -> UserError:
    return UserError(
        f"{where} is not an .npy array of numbers ({reason}). Fix: create or download it again, or leave it out."
    )
