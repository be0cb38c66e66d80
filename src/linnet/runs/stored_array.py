"""Arrays that are read from files on demand, and streaming writes of safetensors files."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError
from linnet.core.files import parse_json

CHUNK = 8 << 20  # bytes read or checked at a time
MAX_HEADER = 100 << 20  # the limit of the safetensors library
TYPES = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16),
    "I8": np.dtype("int8"),
}
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
    """Location of an array's bytes in a file: row-major, in this machine's byte order."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        self.read_into(values)
        return values

    def read_into(self, target: np.ndarray) -> None:
        """Read into `target`, which has this shape and dtype and may be a view. Allocates only one chunk."""
        assert (target.shape, target.dtype) == (self.shape, self.dtype)
        matrices = target if target.ndim > 1 else target[None]
        n_rows, width = matrices.shape[-2], matrices.shape[-1] * self.dtype.itemsize
        rows = min(n_rows, max(1, CHUNK // max(1, width)))
        chunk = np.empty(rows * width, np.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            for index in np.ndindex(matrices.shape[:-2]):
                for start in range(0, n_rows, rows):
                    part = matrices[index][start : start + rows]
                    data = chunk[: part.nbytes]
                    self._fill(file, data)
                    part[...] = data.view(self.dtype).reshape(part.shape)

    def _fill(self, file: io.FileIO, data: np.ndarray) -> None:
        """Fill `data` completely: one `readinto` call may return fewer bytes than requested."""
        view = data.data
        while len(view):
            n = file.readinto(view)
            if not n:
                raise UserError(f"{self.path} became shorter while it was read. Fix: try again.")
            view = view[n:]

    def sha256(self) -> str:
        """SHA-256 of the bytes, read in chunks."""
        digest, left = hashlib.sha256(), self.nbytes
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while left and (data := file.read(min(left, CHUNK))):
                digest.update(data)
                left -= len(data)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """An array to be written. `parts` yields its values in order, so that the complete array is never in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, leaves: Sequence[Leaf], metadata: dict[str, str]) -> dict[str, str]:
    """Write the header, then the parts of each leaf as they are produced. Returns the SHA-256 of each leaf's bytes."""
    sums: dict[str, str] = {}
    with open(path, "xb") as file:
        file.write(_header(leaves, metadata))
        for leaf in leaves:
            digest, n = hashlib.sha256(), 0
            for part in leaf.parts():
                assert part.dtype == leaf.dtype, f"{leaf.name}: {part.dtype} is not {leaf.dtype}"
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                check_finite(part, leaf.name)
                digest.update(data)
                file.write(data)
                n += len(data)
                del part, data  # free it before the next part is made
            assert n == leaf.nbytes, f"{leaf.name} has {n} bytes, not {leaf.nbytes}"
            sums[leaf.name] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return sums


def check_finite(part: np.ndarray, name: str) -> None:
    if part.dtype == np.int8:
        return
    flat = part.reshape(-1)
    step = CHUNK // part.dtype.itemsize
    for start in range(0, flat.size, step):
        if not np.all(np.isfinite(flat[start : start + step].astype(np.float32))):
            raise UserError(f"{name} has values that are not finite. Fix: download it again.")


def _header(leaves: Sequence[Leaf], metadata: dict[str, str]) -> bytes:
    offset, described = 0, dict[str, Any](__metadata__=metadata)
    for leaf in leaves:
        end = offset + leaf.nbytes
        described[leaf.name] = {
            "dtype": TYPE_NAMES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors(path: Path) -> tuple[dict[str, StoredArray], dict[str, str]]:
    """Return the location of each array, and the metadata. The header must cover the file's bytes exactly."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            n = int.from_bytes(file.read(8), "little")
            if size < 8 or n > min(size - 8, MAX_HEADER):
                raise ValueError("it is truncated")
            described = parse_json(file.read(n))
        metadata = described.pop("__metadata__", {})
        arrays = {name: _parse_array(path, 8 + n, value) for name, value in described.items()}
        offset = 8 + n
        for array in sorted(arrays.values(), key=lambda array: array.offset):
            if array.offset != offset:
                raise ValueError("its arrays overlap or leave gaps")
            offset += array.nbytes
        if offset != size:
            raise ValueError(f"it has {size} bytes, but its header describes {offset}")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}). Fix: download or write it again."
        ) from None
    return arrays, metadata


def _parse_array(path: Path, base: int, value: Any) -> StoredArray:
    dtype, shape, (start, end) = TYPES.get(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
    if dtype is None:
        raise ValueError(f"it has values of type {value['dtype']!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError("a shape or an offset is not a number")
    array = StoredArray(path=path, offset=base + start, shape=shape, dtype=dtype)
    if end - start != array.nbytes:
        raise ValueError("an array does not have the bytes it needs")
    return array
