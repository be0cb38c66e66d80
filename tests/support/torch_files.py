"""Files as torch writes them, without torch, for tests."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Callable
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


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to four edits: a byte changed, a stretch removed, copied or replaced."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, kind, n = draw.randrange(len(changed) + 1), draw.randrange(6), draw.randint(1, 40)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at : at + 1] = draw.choice(PICKLE_BYTES)
        elif kind == 2:
            del changed[at : at + n]
        elif kind == 3:
            begin = draw.randrange(len(changed) + 1)
            changed[at:at] = changed[begin : begin + n]
        elif kind == 4:
            width = draw.choice((1, 2, 4, 8))
            changed[at : at + width] = draw.choice((0, 1, 0x7F, 0xFF)).to_bytes(1, "little") * width
        else:
            changed[at : at + n] = draw.randbytes(n)
    return bytes(changed) or b"\0"


PICKLE_BYTES = [bytes([code]) for code in b"KMJN\x88\x89)}\x85\x86\x87(thj\x95X\x8c\x8aG]qr\x94aesuc\x93R\x81bQ."]


def repacked(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The file with its pickle changed and every checksum right, so that the reader gets as far as the change."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            member = old.read(info)
            new.writestr(info.filename, change(member) if info.filename.endswith("/data.pkl") else member)
    return made.getvalue()
