"""Reads (and writes) an `.npz` without trusting it: no pickles, every size checked against the bytes that are really there."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from linnet.errors import UserError

LARGEST = 64 * 2**30  # bytes unpacked; a small file that claims more is not a model


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays by name. A damaged, foreign or pickled file is refused by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            claimed = sum(m.file_size for m in members)
            if claimed > LARGEST:
                raise UserError(
                    f"{path} claims to unpack to {claimed} bytes. Fix: it is damaged or no model; copy it again."
                )
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    arrays[member.filename.removesuffix(".npy")] = _read_array(file, member, path)
            return arrays
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Fix: check the path.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not an .npz file. Fix: name the file in it.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path} is not a whole .npz file ({error}). Fix: copy it again.") from None


def _read_array(file: IO[bytes], member: zipfile.ZipInfo, path: Path) -> np.ndarray:
    name = member.filename
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
    except ValueError as error:
        raise UserError(f"{path}: {name} is not an array ({error}). Fix: write the file with numpy.savez.") from None
    if dtype.hasobject:
        raise UserError(f"{path}: {name} is pickled, which can run code when read. Fix: save it as plain numbers.")
    body = file.read()
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path}: {name} holds {len(body)} bytes, but its shape {shape} of {dtype} needs "
            f"{math.prod(shape) * dtype.itemsize}. Fix: copy the file again."
        )
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **cast(Any, arrays))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
