"""Reads torch's .pth files without torch, and without running anything that they name.

Such a file is a zip: a pickle of what was saved, and the bytes of every tensor beside it. Python's unpickler calls whatever a pickle
names. This reader calls nothing: it knows the opcodes that torch writes, makes tensors and plain containers, and keeps any other
object (a version, a schedule of the optimiser) as its name only. Names from outside of the libraries that such checkpoints are
made with are refused.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from linnet.errors import UserError
from linnet.train.interchange.pickle_stack import PLAIN, Name, PickleStack

MOST_PICKLE = 256 << 20
MOST_AXES = 16
STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("int8"),
    "ByteStorage": np.dtype("uint8"),
    "BoolStorage": np.dtype("bool"),
}
TENSOR = ("torch._utils", "_rebuild_tensor_v2")
PARAMETER = ("torch._utils", "_rebuild_parameter")
ORDERED = ("collections", "OrderedDict")
LIBRARIES = ("torch", "collections", "packaging", "pytorch_warmup", "numpy", "dalle2_pytorch", "ema_pytorch")


@dataclasses.dataclass(eq=False)
class Inert:
    """An object that is no tensor and no container: its name, and what was to be put into it. Nothing was made of it."""

    module: str
    name: str
    arguments: Any = ()
    state: Any = None


def read_torch(path: Path) -> Any:
    """What the file holds: dicts, lists, tuples, numbers, text, arrays; `Inert` for anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _Reader(path, archive).read()
    except zipfile.BadZipFile:
        raise UserError(
            f"{path} is not a .pth file that torch 1.6 or later wrote. Fix: load and save it again with a newer torch."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: check the path.") from None


class _Reader(PickleStack):
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        super().__init__()
        self.path, self.archive = path, archive
        self.members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            self.refuse("it has no single data.pkl")
        self.folder = pickles[0].removesuffix("data.pkl")
        order = self.members.get(self.folder + "byteorder")
        if order is not None and self.bytes_of(order).strip() != b"little":
            self.refuse("its numbers are stored big end first")
        self.data = self.bytes_of(self.members[pickles[0]])
        self.at = 0
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, np.ndarray] = {}

    def refuse(self, why: str) -> NoReturn:
        raise UserError(
            f"{self.path} is not a checkpoint that Linnet reads: {why}. Nothing in it was run. "
            "Fix: download it again, and only from a source that you trust."
        )

    def bytes_of(self, info: zipfile.ZipInfo) -> bytes:
        """torch never compresses: a member is as large in the file as out of it, so no small file can claim much."""
        if info.compress_type != zipfile.ZIP_STORED:
            self.refuse(f"{info.filename} is compressed")
        if info.filename.endswith("data.pkl") and info.file_size > MOST_PICKLE:
            self.refuse(f"its pickle has {info.file_size} bytes")
        try:
            return self.archive.read(info)
        except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, OSError) as error:
            self.refuse(f"{info.filename} cannot be read ({error})")

    def read(self) -> Any:
        if self.take(2)[:1] != b"\x80" or self.data[1] not in (2, 3, 4, 5):
            self.refuse("its pickle does not begin as one")
        while True:
            code = self.take(1)
            if code == b".":
                break
            if code not in OPCODES:
                self.refuse(f"the byte {code[0]} at {self.at - 1} is no opcode of a checkpoint")
            OPCODES[code](self)
        value = self.pop()
        if self.stack or self.at != len(self.data):
            self.refuse("something is left over after the end")
        return value

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            self.refuse("its pickle is cut short")
        self.at += n
        return self.data[self.at - n : self.at]

    def text(self, n: int) -> str:
        return self.take(n).decode("utf-8", "replace")

    def frame(self) -> None:
        """How many bytes follow: of no use where all are at hand."""
        self.take(8)

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.refuse("its pickle is cut short")
        found = self.text(end - self.at)
        self.at += 1
        return found

    def put(self, place: int) -> None:
        if not self.stack:
            self.refuse("a value is missing")
        self.memo[place] = self.stack[-1]

    def recall(self, place: int) -> None:
        if place not in self.memo:
            self.refuse("it remembers what it never saw")
        self.push(self.memo[place])

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)) or module.split(".")[0] not in LIBRARIES:
            self.refuse(f"it names {module}.{name}, which is no part of a checkpoint")
        self.push(Name(module, name))

    def call(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            self.refuse("it calls something that has no name")
        if called.key == ORDERED and not arguments:
            self.push({})
        elif called.key == TENSOR:
            self.push(self.tensor(*arguments[:4]) if len(arguments) >= 4 else self.refuse("a tensor is not whole"))
        elif called.key == PARAMETER and arguments and isinstance(arguments[0], np.ndarray):
            self.push(arguments[0])
        else:
            self.push(Inert(called.module, called.name, arguments))

    def build(self) -> None:
        """A container's own attributes (torch marks state dicts with their version) are of no use here."""
        state, target = self.pop(), self.pop()
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict):
            self.refuse("it changes what is no object")
        self.push(target)

    def items(self, pairs: list[Any]) -> None:
        target = self.pop()
        if not isinstance(target, dict) or len(pairs) % 2:
            self.refuse("values are set in what is no table")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(name, str | int | float | bool | None):
                self.refuse("a table has a key that is neither text nor a number")
            target[name] = value
        self.push(target)

    def append(self, values: list[Any]) -> None:
        target = self.pop()
        if not isinstance(target, list):
            self.refuse("values are added to what is no list")
        target.extend(values)
        self.push(target)

    def storage(self) -> None:
        value = self.pop()
        if not (isinstance(value, tuple) and len(value) >= 5 and value[0] == "storage" and isinstance(value[1], Name)):
            self.refuse("it refers to what is no storage")
        _, kind, key, _, size = value[:5]
        dtype = STORAGES.get(kind.name)
        member = self.members.get(f"{self.folder}data/{key}")
        if dtype is None or member is None or type(size) is not int:
            self.refuse(f"the storage {key!r} of {kind.name} is not there or not of a known type")
        if size * dtype.itemsize != member.file_size:
            self.refuse(f"the storage {key!r} has {member.file_size} bytes, not {size} values of {dtype}")
        if key not in self.storages:
            self.storages[key] = np.frombuffer(self.bytes_of(member), dtype)
        self.push(self.storages[key])

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> np.ndarray:
        numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
        if not isinstance(storage, np.ndarray) or not all(type(n) is int and n >= 0 for n in numbers):
            self.refuse("a tensor's shape is not one")
        if len(shape) != len(strides) or len(shape) > MOST_AXES or math.prod(shape) > storage.size:
            self.refuse("a tensor's shape is not one")
        if math.prod(shape) == 0:
            return np.zeros(shape, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= storage.size:
            self.refuse("a tensor reaches beyond its storage")
        size = storage.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(storage[offset:], shape, [n * size for n in strides], writeable=False)
        return np.array(view, order="C")


def _float(r: _Reader) -> None:
    r.push(struct.unpack(">d", r.take(8))[0])


def _new(r: _Reader) -> None:
    arguments, kind = r.pop(), r.pop()
    if not isinstance(kind, Name):
        r.refuse("it makes something that has no name")
    r.push(Inert(kind.module, kind.name, arguments))


def _global(r: _Reader) -> None:
    module = r.line()
    r.name(module, r.line())


def _stacked_global(r: _Reader) -> None:
    name, module = r.pop(), r.pop()
    r.name(module, name)


OPCODES: dict[bytes, Callable[[_Reader], None]] = {
    **PLAIN,
    b"\x95": _Reader.frame,
    b"X": lambda r: r.push(r.text(r.number(4))),
    b"\x8c": lambda r: r.push(r.text(r.number(1))),
    b"\x8a": lambda r: r.push(r.number(r.number(1), signed=True)),
    b"G": _float,
    b"]": lambda r: r.push([]),
    b"q": lambda r: r.put(r.number(1)),
    b"r": lambda r: r.put(r.number(4)),
    b"\x94": lambda r: r.put(len(r.memo)),
    b"a": lambda r: r.append([r.pop()]),
    b"e": lambda r: r.append(r.pop_to_mark()),
    b"s": lambda r: r.items([r.pop(), r.pop()][::-1]),
    b"u": lambda r: r.items(r.pop_to_mark()),
    b"c": _global,
    b"\x93": _stacked_global,
    b"R": _Reader.call,
    b"\x81": _new,
    b"b": _Reader.build,
    b"Q": _Reader.storage,
}
