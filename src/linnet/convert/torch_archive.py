"""The zip container of a .pth file: one pickle, and one stored (uncompressed) member for the bytes of each tensor storage.

The file is untrusted. Nothing is unpacked: the file is memory-mapped and storages are read-only views of it, so a file cannot make
the reader allocate more than its own size, however often it refers to a storage. Each member used is checked against its CRC.
"""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from linnet.core.errors import UserError

MAX_PICKLE = 32 << 20
MAX_DIRECTORY = 8 << 20
"""Bytes of the zip's directory: about 100 per tensor."""
MAX_TAIL = 1 << 17
"""More than the largest comment (64 KiB) with the end record."""
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
ENCRYPTED = 0x1
ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error, OverflowError, MemoryError)
"""Exceptions of `zipfile` for damaged directories (UnicodeDecodeError is a ValueError)."""


class TorchArchive:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(_BoundedReads(file)) as archive:  # pyright: ignore[reportArgumentType]
                entries = archive.infolist()
        except _TooLarge:
            self.fail(f"its directory has more than {MAX_DIRECTORY} bytes")
        except ZIP_ERRORS:
            raise UserError(
                f"{path} is not a .pth file that torch 1.6 or later wrote. Fix: load and save it again with a newer torch."
            ) from None
        self.members = {entry.filename: entry for entry in entries}
        if len(self.members) != len(entries):
            self.fail("two of its members have the same name")
        self.data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        pickles = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            self.fail("it has no single data.pkl")
        self.folder = pickles[0].removesuffix("data.pkl")
        self._used = 0
        order = self.members.get(self.folder + "byteorder")
        if order is not None and bytes(self._bytes(order)).strip() != b"little":
            self.fail("its numbers are stored in big-endian order")
        if self.members[pickles[0]].file_size > MAX_PICKLE:
            self.fail(f"its pickle has more than {MAX_PICKLE} bytes")
        self.pickle = bytes(self._bytes(self.members[pickles[0]]))
        self._storages: dict[str, memoryview] = {}

    def fail(self, why: str) -> NoReturn:
        raise UserError(
            f"{self.path} is not a checkpoint that Linnet reads: {why}. Nothing in it was run. "
            "Fix: download it again, and only from a source that you trust."
        )

    def storage(self, key: str, dtype: np.dtype, size: int) -> np.ndarray:
        """Return `size` values as a read-only view, shared by all tensors with the same key."""
        if key not in self._storages:
            member = self.members.get(f"{self.folder}data/{key}")
            if member is None:
                self.fail("a tensor's storage is missing")
            self._storages[key] = self._bytes(member)
        data = self._storages[key]
        if size < 0 or size * dtype.itemsize != len(data):
            self.fail("a tensor's storage does not have the size it states")
        return np.frombuffer(data, dtype) if size else np.zeros(0, dtype)

    def _bytes(self, member: zipfile.ZipInfo) -> memoryview:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            self.fail("a member is compressed, which torch never does")
        if member.flag_bits & ENCRYPTED:
            self.fail("a member is encrypted")
        # Members of a valid file do not overlap: together they cannot exceed the file.
        self._used += member.file_size
        begin, size = member.header_offset, member.file_size
        if self._used > self.size or begin < 0 or begin + LOCAL_HEADER.size > self.size:
            self.fail("its members overlap or reach beyond its end")
        magic, *_, n_name, n_extra = LOCAL_HEADER.unpack_from(self.data, begin)
        begin += LOCAL_HEADER.size + n_name + n_extra
        if magic != b"PK\x03\x04" or begin + size > self.size:
            self.fail("its members overlap or reach beyond its end")
        found = self.data[begin : begin + size]
        if zlib.crc32(found) != member.CRC:
            self.fail("a member is damaged (its checksum differs)")
        return found


class _TooLarge(Exception):
    pass


class _BoundedReads:
    """File wrapper that limits reads, because `zipfile` reads the directory in one call whose size the file states."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, n: int = -1) -> bytes:
        found = self.file.read(MAX_TAIL if n < 0 else min(n, MAX_DIRECTORY + 1))
        if len(found) > MAX_DIRECTORY:
            raise _TooLarge
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        pass
