"""Write torch's .pth files without torch: dicts, lists, tuples, numbers, text and arrays, as `torch.save` writes them.

The result loads with `torch.load(path, weights_only=True)`. An array that occurs several times is stored once.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from linnet.convert.torch_pickle import ORDERED_DICT, STORAGES, TENSOR
from linnet.core.files import atomic_file

STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}
ALIGNMENT = 64
"""Alignment of a storage in the file, so that torch can memory-map it."""
FOLDER = "archive"
EARLIEST = (1980, 1, 1, 0, 0, 0)
"""A fixed timestamp, so that the same value gives the same file."""


def write_torch(path: Path, value: Any) -> None:
    """Write the file atomically."""
    pickled = _Pickler()
    data = pickled.dump(value)
    with atomic_file(path, sync=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", data)
        _add(archive, "byteorder", b"little")
        for key, array in enumerate(pickled.storages):
            _add(archive, f"data/{key}", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        _add(archive, "version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    member = zipfile.ZipInfo(f"{FOLDER}/{name}", EARLIEST)
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(member.filename) + 4
    padding = -begin % ALIGNMENT
    member.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    archive.writestr(member, data)


class _Pickler:
    """Writes protocol 2 with opcodes that every release of torch reads."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.storages: list[np.ndarray] = []
        self._keys: dict[int, int] = {}

    def dump(self, value: Any) -> bytes:
        self._value(value)
        return bytes(self.out) + b"."

    def _value(self, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode()
            self.out += b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, np.ndarray):
            self._tensor(value)
        elif isinstance(value, dict):
            self.out += b"}("
            for key, item in value.items():
                self._value(key)
                self._value(item)
            self.out += b"u"
        elif isinstance(value, list | tuple):
            self.out += b"](" if isinstance(value, list) else b"("
            for item in value:
                self._value(item)
            self.out += b"e" if isinstance(value, list) else b"t"
        else:
            raise TypeError(f"a checkpoint cannot contain {type(value).__name__}")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data

    def _tensor(self, value: np.ndarray) -> None:
        if id(value) not in self._keys:
            self._keys[id(value)] = len(self.storages)
            self.storages.append(value)  # keeps a reference, so that its id is not reused
        self.out += _name(TENSOR) + b"(("
        self._value("storage")
        self.out += _name(("torch", STORAGE_NAMES[value.dtype]))
        for part in (str(self._keys[id(value)]), "cpu", int(value.size)):
            self._value(part)
        self.out += b"tQK\x00"
        strides = [int(np.prod(value.shape[i + 1 :], dtype=np.int64)) for i in range(value.ndim)]
        self._value(value.shape)
        self._value(tuple(strides))
        self.out += b"\x89" + _name(ORDERED_DICT) + b")RtR"


def _name(key: tuple[str, str]) -> bytes:
    return b"c" + "\n".join(key).encode() + b"\n"
