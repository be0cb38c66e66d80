"""Atomic writing of .npy files, at once or block by block, and arrays cached in such files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from linnet.core.errors import UserError
from linnet.core.files import atomic_write
from linnet.data.sources.files import writing
from linnet.data.sources.npy import map_npy


def write_array(path: Path, values: np.ndarray) -> None:
    """Write an array as .npy."""
    file = io.BytesIO()
    np.save(file, values)
    atomic_write(path, file.getbuffer())


def cached_array(
    path: Path, compute: Callable[[], np.ndarray], is_valid: Callable[[np.ndarray], bool] = lambda array: True
) -> np.ndarray:
    """Return the array cached at `path`, memory-mapped. It is computed if the file is missing, damaged or not valid."""
    with contextlib.suppress(UserError):
        array = map_npy(path)
        if is_valid(array):
            return array
    array = compute()
    # If the cache is not writable, the array is only computed again the next time.
    with contextlib.suppress(UserError):
        write_array(path, array)
    return array


class RowWriter:
    """Writes an .npy file block by block, for arrays too large for memory. The file gets its final name when it is complete."""

    HEADER = 128
    """Header size in bytes. The header contains the number of rows, so it is written last, into space reserved for it."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._path, self._shape, self._dtype, self._n = path, shape, np.dtype(dtype), 0
        # The name does not contain the process id, so that after a kill the next run overwrites the leftover, which may be gigabytes.
        self._part = path.with_name(f".{path.name}.part")
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._part, "wb")  # noqa: SIM115
            self._file.write(b"\0" * self.HEADER)

    def add(self, rows: Shaped[np.ndarray, "k ..."]) -> None:
        assert rows.shape[1:] == self._shape, f"rows of {rows.shape[1:]} in a file of {self._shape}"
        with self._writing():
            self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._n += len(rows)

    def finish(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._n, *self._shape)}
        start = np.lib.format.magic(1, 0) + (self.HEADER - 10).to_bytes(2, "little")
        text = repr(header).encode("latin1")
        assert len(start) + len(text) < self.HEADER
        with self._writing():
            self._file.seek(0)
            self._file.write(start + text.ljust(self.HEADER - len(start) - 1) + b"\n")
            self._file.close()
            os.replace(self._part, self._path)

    def discard(self) -> None:
        """Remove the partial file. After `finish` there is nothing to remove."""
        with contextlib.suppress(OSError):  # on a full disk closing fails again
            self._file.close()
        self._part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with writing(self._path, "choose a writable folder with free space"):
                yield
        except UserError:
            with contextlib.suppress(OSError):
                self._part.unlink()
            raise
