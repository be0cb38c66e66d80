"""Files as torch writes them, without torch, for tests."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

TENSOR = "torch._utils\n_rebuild_tensor_v2\n"


class Writer:
    """A .pth file as torch writes it, of nested dicts, lists, numbers and float32 arrays; `raw` opcodes go in as they are."""

    def __init__(self) -> None:
        self.out, self.storages = io.BytesIO(), list[np.ndarray]()

    def value(self, x: Any) -> None:
        write = self.out.write
        if isinstance(x, bytes):
            write(x)
        elif isinstance(x, dict):
            write(b"}")
            for key, item in x.items():
                self.value(key)
                self.value(item)
                write(b"s")
        elif isinstance(x, str):
            write(b"X" + struct.pack("<I", len(x.encode())) + x.encode())
        elif isinstance(x, int):
            write(b"J" + struct.pack("<i", x))
        elif isinstance(x, float):
            write(b"G" + struct.pack(">d", x))
        else:
            strides = [s // x.itemsize for s in np.ascontiguousarray(x).strides]
            self.tensor(np.ascontiguousarray(x), x.shape, strides)

    def tensor(self, x: np.ndarray, shape: Any, strides: Any, offset: int = 0) -> None:
        key = str(len(self.storages))
        self.storages.append(x)
        self.out.write(b"c" + TENSOR.encode() + b"((")
        for part in ("storage", b"ctorch\nFloatStorage\n", key, "cpu", int(x.size)):
            self.value(part)
        self.out.write(b"tQ")
        self.value(offset)
        for numbers in (shape, strides):
            self.out.write(b"(")
            for n in numbers:
                self.value(int(n))
            self.out.write(b"t")
        self.out.write(b"\x89ccollections\nOrderedDict\n)RtR")

    def save(self, path: Path, value: Any = None, compression: int = zipfile.ZIP_STORED) -> Path:
        if value is not None:
            self.value(value)
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + self.out.getvalue() + b".")
            archive.writestr("archive/byteorder", "little")
            for i, x in enumerate(self.storages):
                archive.writestr(f"archive/data/{i}", x.astype("<f4").tobytes())
        return path
