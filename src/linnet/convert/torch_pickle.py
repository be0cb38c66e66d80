"""Read torch's .pth files without torch, and without executing anything that they name.

Python's unpickler imports and calls whatever a pickle names. This reader calls nothing: it implements the opcodes that torch
writes, builds plain containers and views of the file's tensors, and represents the few other objects in DALLE2-pytorch's
checkpoints (a version, the warm-up schedule with its optimizer) by an `Inert` record. Any name outside `KNOWN` is an error.

The file is untrusted: the number of opcodes, the depth and the expanded size of the result are bounded, and no value of the file
appears in a message.
"""

from __future__ import annotations

import dataclasses
import math
import re
import stat
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from linnet.convert.pickle_stack import PLAIN, Name, PickleStack
from linnet.convert.torch_archive import TorchArchive
from linnet.core.errors import UserError

MAX_OPCODES = 500_000
"""A prior of 24 layers, saved with its trainer and CLIP, has about 100,000."""
MAX_DEPTH = 32
MAX_VALUES = 2_000_000
"""Maximum values in a walk over the result, where a shared value counts each time it is reached."""
MAX_AXES = 16
MAX_INT = 1 << 60
"""Larger keys could be chosen to have equal hashes, which makes a dict quadratic."""

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
ORDERED_DICT = ("collections", "OrderedDict")
INERT = {
    # Warm-up: the pickled schedule contains its optimizer, whose state is a defaultdict keyed by parameters.
    ("pytorch_warmup.base", "LinearWarmup"),
    ("torch.optim.adam", "Adam"),
    ("torch.optim.adamw", "AdamW"),
    ("collections", "defaultdict"),
    ("__builtin__", "dict"),
    ("builtins", "dict"),
    # The version, as several releases of packaging pickle it.
    ("packaging.version", "Version"),
    ("packaging.version", "_Version"),
    ("packaging._structures", "Infinity"),
    ("packaging._structures", "InfinityType"),
    ("packaging._structures", "NegativeInfinity"),
    ("packaging._structures", "NegativeInfinityType"),
    # Metadata beside the weights may be a device, a shape or a numpy scalar.
    ("torch", "device"),
    ("torch", "Size"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("_codecs", "encode"),
}
KNOWN = INERT | {TENSOR, PARAMETER, ORDERED_DICT} | {("torch", name) for name in STORAGES}
SHOWABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,79}")


@dataclasses.dataclass(eq=False)
class Inert:
    """Record of an object that is neither a tensor nor a plain container: its name, arguments and state. It was not created."""

    module: str
    name: str
    arguments: Any = ()
    state: Any = None


def read_torch(path: Path) -> Any:
    """Return the content of a file: dicts, lists, tuples, numbers, text, read-only arrays; `Inert` for anything else."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a file. Fix: name the .pth file.")
        with open(path, "rb") as file:
            return _Reader(TorchArchive(path, file)).read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: check the path.") from None


class _Reader(PickleStack):
    def __init__(self, archive: TorchArchive) -> None:
        super().__init__()
        self.archive, self.data = archive, archive.pickle
        self.at = 0
        self.memo: dict[int, Any] = {}

    def fail(self, why: str) -> NoReturn:
        self.archive.fail(why)

    def read(self) -> Any:
        if self.take(2)[:1] != b"\x80" or self.data[1] not in (2, 3, 4, 5):
            self.fail("its pickle does not start as one")
        for _ in range(MAX_OPCODES):
            code = self.take(1)
            if code == b".":
                return self.result()
            if code not in OPCODES:
                self.fail(f"the byte {code[0]} at {self.at - 1} is not an opcode of a checkpoint")
            OPCODES[code](self)
        self.fail(f"its pickle has more than {MAX_OPCODES} opcodes")

    def result(self) -> Any:
        value = self.pop()
        if self.stack or self.at != len(self.data):
            self.fail("data remains after the end")
        self.check_extent(value)
        return value

    def check_extent(self, root: Any) -> None:
        """Check depth and size of the result as a tree, so that any walk over it is short. A cycle is an error.

        Iterative, each container once: (depth, size) follow from those of its children.
        """
        known: dict[int, tuple[int, int] | None] = {}
        todo = [root]
        while todo:
            value = todo[-1]
            if known.get(id(value)) is not None:
                todo.pop()  # also reached by another path; its children are not visited again
                continue
            children = [child for child in _children(value) if isinstance(child, CONTAINERS)]
            if id(value) not in known:
                known[id(value)] = None
                for key, child in {id(child): child for child in children}.items():
                    if known.get(key, ()) is None:
                        self.fail("a value contains itself")
                    if key not in known:
                        todo.append(child)
                continue
            todo.pop()
            extents = [extent for child in children if (extent := known[id(child)]) is not None]
            depth = 1 + max((depth for depth, _ in extents), default=0)
            size = 1 + _n_children(value) + sum(size for _, size in extents)
            if depth > MAX_DEPTH or size > MAX_VALUES:
                self.fail("its values are nested too deeply")
            known[id(value)] = depth, size

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            self.fail("its pickle is truncated")
        self.at += n
        return self.data[self.at - n : self.at]

    def text(self, n: int) -> str:
        return self.take(n).decode("utf-8", "replace")

    def frame(self) -> None:
        """Skip a length hint for streaming readers."""
        self.take(8)

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.fail("its pickle is truncated")
        found = self.text(end - self.at)
        self.at += 1
        return found

    def put(self, place: int) -> None:
        value = self.pop()
        self.push(value)
        self.memo[place] = value

    def recall(self, place: int) -> None:
        if place not in self.memo:
            self.fail("it refers to a value that it did not store")
        self.push(self.memo[place])

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            self.fail("it names something by a value that is not text")
        if (module, name) not in KNOWN:
            shown = f"{module[:99]}.{name[:99]}"
            odd = shown if SHOWABLE.fullmatch(shown) else "something"
            self.fail(f"it names {odd}, which is not part of a prior's checkpoint")
        self.push(Name(module, name))

    def call(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            self.fail("it calls something that has no name")
        if called.key == ORDERED_DICT and not arguments:
            self.push({})
        elif called.key == TENSOR:
            self.push(self.tensor(*arguments[:4]) if len(arguments) >= 4 else self.fail("a tensor is incomplete"))
        elif called.key == PARAMETER and arguments and isinstance(arguments[0], np.ndarray):
            self.push(arguments[0])
        elif called.key in INERT:
            self.push(Inert(called.module, called.name, arguments))
        else:
            self.fail("it calls something that does not create a tensor")

    def new(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Name) or kind.key not in INERT:
            self.fail("it creates something that is not part of a checkpoint")
        self.push(Inert(kind.module, kind.name, arguments))

    def build(self) -> None:
        """Set the state of an `Inert`. Attributes of a container (torch marks state dicts with their version) are ignored."""
        state, target = self.pop(), self.pop()
        if isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict):
            self.fail("it changes a value that is not an object")
        self.push(target)

    def items(self, pairs: list[Any]) -> None:
        target = self.pop()
        if len(pairs) % 2 or not isinstance(target, dict | Inert):
            self.fail("values are set in something that is not a table")
        if isinstance(target, dict):  # items of an inert table are dropped: their keys may be tensors
            for name, value in zip(pairs[::2], pairs[1::2], strict=True):
                if not _is_key(name):
                    self.fail("a table has a key that is neither text nor a number")
                target[name] = value
        self.push(target)

    def append(self, values: list[Any]) -> None:
        target = self.pop()
        if not isinstance(target, list):
            self.fail("values are appended to something that is not a list")
        target.extend(values)
        self.push(target)

    def storage(self) -> None:
        value = self.pop()
        if not (isinstance(value, tuple) and len(value) >= 5 and isinstance(value[1], Name)):
            self.fail("it refers to something that is not a storage")
        mark, kind, key, _, size = value[:5]
        dtype = STORAGES.get(kind.name) if kind.module == "torch" else None
        if not (isinstance(mark, str) and mark == "storage" and isinstance(key, str) and type(size) is int):
            self.fail("it refers to something that is not a storage")
        if dtype is None:
            self.fail("a storage has a type that Linnet does not read")
        self.push(self.archive.storage(key, dtype, size))

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> np.ndarray:
        """Return a view: tensors that share a storage share its bytes."""
        numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
        if not isinstance(storage, np.ndarray) or not all(type(n) is int and 0 <= n < MAX_INT for n in numbers):
            self.fail("a tensor's shape is invalid")
        if len(shape) != len(strides) or len(shape) > MAX_AXES or math.prod(n for n in shape if n) * 8 > MAX_INT:
            self.fail("a tensor's shape is invalid")
        if math.prod(shape) == 0:
            return np.zeros(shape, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= storage.size or math.prod(shape) > storage.size:
            self.fail("a tensor reaches beyond its storage")
        size = storage.dtype.itemsize
        steps = [step * size if n > 1 else 0 for n, step in zip(shape, strides, strict=True)]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


CONTAINERS = (dict, list, tuple, Inert)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, Inert):
        return (value.arguments, value.state)
    return value if isinstance(value, list | tuple) else ()


def _n_children(value: Any) -> int:
    return len(value) if isinstance(value, dict | list | tuple) else 2


def _is_key(value: Any) -> bool:
    return value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) < MAX_INT)


def _float(r: _Reader) -> None:
    r.push(struct.unpack(">d", r.take(8))[0])


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
    b"\x81": _Reader.new,
    b"b": _Reader.build,
    b"Q": _Reader.storage,
}
