"""Read (and write) untrusted `.npz` files: no pickles, and every size is checked against the actual bytes."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from linnet.core.errors import UserError
from linnet.core.files import atomic_file
from linnet.data.sources.archives import open_zip, zip_files
from linnet.data.sources.files import reading
from linnet.data.sources.npy import check_size, read_npy_header
from linnet.data.sources.unpack_budget import UnpackBudget


def read_npz(path: Path, limit_gb: float | None = None, flag: str | None = None) -> dict[str, np.ndarray]:
    """Return all arrays by name.

    A damaged, foreign or pickled file raises an error that names it, as does one that unpacks to more than `UnpackBudget` allows.
    `flag` is the command-line flag that sets `limit_gb`, if there is one.
    """
    _check_is_file(path)
    with reading(path), open_zip(path) as archive:
        members = zip_files(archive)
        budget = UnpackBudget(path, path.stat().st_size, limit_gb, flag)
        budget.claim(sum(member.file_size for member in members))
        return {member.filename.removesuffix(".npy"): _read_array(archive, member, path) for member in members}


def read_npz_array(path: Path, name: str) -> np.ndarray:
    """Return one array, without reading the others."""
    _check_is_file(path)
    with reading(path), open_zip(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        UnpackBudget(path, path.stat().st_size, flag=None).claim(member.file_size)
        return _read_array(archive, member, path)


def list_npz(path: Path) -> set[str]:
    with reading(path), open_zip(path) as archive:
        return {member.filename.removesuffix(".npy") for member in zip_files(archive)}


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not an .npz file. Fix: name the file in it.")
    if not path.exists():
        raise UserError(f"{path} does not exist. Fix: check the path.")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> np.ndarray:
    where = f"{path}: {member.filename}"
    with archive.open(member) as file:
        header = read_npy_header(file, where)
        check_size(header, max(0, member.file_size - header.offset), where)
        body = file.read(header.n_bytes + 1)
    if len(body) != header.n_bytes:
        raise UserError(
            f"{where} holds {len(body):,} bytes or more, but its shape {header.shape} of {header.dtype} needs {header.n_bytes:,}. "
            "Fix: copy the file again."
        )
    values = np.frombuffer(body, header.dtype, math.prod(header.shape))
    return values.reshape(header.shape, order="F" if header.fortran_order else "C")


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the file atomically."""
    savez: Any = np.savez  # its type takes an array for the option `allow_pickle`
    with atomic_file(path, sync=True) as file:
        savez(file, **arrays)
