"""Read the pickles of Grok-1's release without executing them: find the offset, shape and dtype of each array.

Python's own unpickler calls whatever a file names. This reader calls nothing: it implements the few opcodes that the release's
files consist of, keeps every name as text, and compares each step with the structure of a numpy array or an 8-bit pair. Anything
else is an error. The bytes of an array are located but not read; a file cannot claim more of them than it has.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickletools
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import jax.numpy as jnp
import numpy as np

from linnet.convert.pickle_stack import PLAIN, Name, PickleStack
from linnet.core.errors import UserError
from linnet.runs.stored_array import StoredArray

PROTOCOL = 4
MAX_OPCODES = 1000  # the release's longest file has about 120
MAX_TEXT = 256  # bytes of a name
MAX_AXES = 8
SHOWABLE = re.compile(r"[A-Za-z0-9_.<>|=]{1,80}")

ARRAY = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
NDARRAY, DTYPE, BFLOAT16 = ("numpy", "ndarray"), ("numpy", "dtype"), ("ml_dtypes", "bfloat16")
PAIR = ("__main__", "QuantizedWeight8bit")
NAMES = {*ARRAY, NDARRAY, DTYPE, BFLOAT16, PAIR}

# The byte order is part of the type: data of the other byte order would be misread.
TYPES = {"f4": (np.dtype("float32"), "<"), "i1": (np.dtype("int8"), "|")}
BFLOAT16_TYPE = (np.dtype(jnp.bfloat16), "<")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPair:
    weight: StoredArray
    scales: StoredArray


@dataclasses.dataclass(frozen=True)
class _Bytes:
    offset: int
    size: int


@dataclasses.dataclass(eq=False)
class _Object:
    """A dtype, an array or a pair, between its creation and the BUILD opcode that sets its state."""

    kind: str
    value: Any = None
    built: bool = False


def read_pickle(path: Path) -> StoredArray | StoredPair:
    """Return the content of a file. Raises a UserError unless it is a complete array or 8-bit pair of a known type."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise UserError(f"{path} cannot be read: it is not a file. Fix: check the path.")
        with open(path, "rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: check the path.") from None


class _Reader(PickleStack):
    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__()
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self.memo: list[Any] = []

    def read(self) -> StoredArray | StoredPair:
        if self.take(2) != bytes([0x80, PROTOCOL]):
            self.fail(f"it does not start as a pickle of protocol {PROTOCOL}")
        for _ in range(MAX_OPCODES):
            code = self.take(1)
            if code == b".":
                return self.result()
            if code not in OPCODES:
                self.fail(f"{_opcode_name(code)} is not part of an array")
            OPCODES[code](self)
        self.fail(f"it has more than {MAX_OPCODES} opcodes")

    def fail(self, why: str) -> NoReturn:
        raise UserError(
            f"{self.path} is not a tensor of a Grok-1 checkpoint: at byte {self.at}, {why}. Nothing in it was run. "
            "Fix: download the file again, and only from a source that you trust."
        )

    # Bytes.

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            self.fail(f"{n} bytes should follow, but the file has {self.size - self.at}: it is truncated")
        found = self.file.read(n)
        if len(found) != n:
            self.fail("the file ends early")
        self.at += n
        return found

    # The opcodes.

    def frame(self) -> None:
        """Read the frame length, which is not used but must be valid."""
        n = self.number(8)
        if n > self.size - self.at:
            self.fail(f"a frame of {n} bytes is longer than the file")

    def long(self) -> None:
        n = self.number(1)
        if n > 8:
            self.fail(f"a number of {n} bytes")
        self.push(self.number(n, signed=True))

    def text(self, n_length: int) -> None:
        n = self.number(n_length)
        if n > MAX_TEXT:
            self.fail(f"a name of {n} bytes")
        try:
            self.push(self.take(n).decode("ascii"))
        except UnicodeDecodeError:
            self.fail("a name that is not plain text")

    def payload(self, n_length: int) -> None:
        n = self.number(n_length)
        if n > self.size - self.at:
            self.fail(f"{n} bytes should follow, but the file has {self.size - self.at}: it is truncated")
        self.push(_Bytes(self.at, n))
        self.at += n
        self.file.seek(self.at)

    def recall(self, place: int) -> None:
        if place >= len(self.memo):
            self.fail(f"value {place} is read before it was stored")
        self.push(self.memo[place])

    def memoize(self) -> None:
        value = self.pop()
        self.push(value)
        self.memo.append(value)

    def name(self) -> None:
        name, module = self.pop(), self.pop()
        if not (isinstance(module, str) and isinstance(name, str) and (module, name) in NAMES):
            self.fail(f"it names {_printable(module)}.{_printable(name)}")
        self.push(Name(module, name))

    def new(self) -> None:
        arguments, name = self.pop(), self.pop()
        if not (isinstance(name, Name) and name.key == PAIR and arguments == ()):
            self.fail("it creates an object that is not an 8-bit pair")
        self.push(_Object("pair"))

    def call(self) -> None:
        """Match the call of an empty array before its state, or of a dtype before its byte order; nothing is called."""
        arguments, name = self.pop(), self.pop()
        key = name.key if isinstance(name, Name) else None
        if key in ARRAY and isinstance(arguments, tuple) and len(arguments) == 3:
            of, shape, kind = arguments
            if isinstance(of, Name) and of.key == NDARRAY and shape == (0,) and self.is_byte(kind, b"b"):
                return self.push(_Object("array"))
        if (
            key == DTYPE
            and isinstance(arguments, tuple)
            and len(arguments) == 3
            and _matches_flags(arguments[1:], (0, 1))
        ):
            of = arguments[0]
            if isinstance(of, Name) and of.key == BFLOAT16:
                return self.push(_Object("dtype", BFLOAT16_TYPE))
            if isinstance(of, str) and of in TYPES:
                return self.push(_Object("dtype", TYPES[of]))
            self.fail(f"it has values of type {_printable(of)}")
        self.fail("it calls something that does not create an array")

    def is_byte(self, value: Any, expected: bytes) -> bool:
        if not isinstance(value, _Bytes) or value.size != 1:
            return False
        self.file.seek(value.offset)
        found = self.file.read(1)
        self.file.seek(self.at)
        return found == expected

    def item(self, pairs: list[Any]) -> None:
        values = self.pop()
        if not isinstance(values, dict) or len(pairs) % 2:
            self.fail("values are set in something that is not a dict")
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            if name not in ("weight", "scales") or name in values or not isinstance(value, _Object):
                self.fail(f"an 8-bit pair has no {_printable(name)}")
            values[name] = value
        self.push(values)

    def build(self) -> None:
        state, target = self.pop(), self.pop()
        if not isinstance(target, _Object) or target.built:
            self.fail("it modifies a complete object")
        if target.kind == "dtype":
            self.build_dtype(target, state)
        elif target.kind == "array":
            target.value = self.array(state)
        else:
            target.value = self.pair(state)
        target.built = True
        self.push(target)

    def build_dtype(self, target: _Object, state: Any) -> None:
        """Check version 3, byte order, no subarrays and no fields, and sizes that the type itself fixes."""
        fits = isinstance(state, tuple) and len(state) == 8 and state[0] == 3 and state[2:5] == (None, None, None)
        if not (fits and all(type(value) is int for value in (state[0], *state[5:]))):
            self.fail("a dtype is not a plain one")
        if state[1] != target.value[1]:
            self.fail(f"the byte order {_printable(state[1])} is not that of the release")

    def array(self, state: Any) -> StoredArray:
        if not (isinstance(state, tuple) and len(state) == 5 and type(state[0]) is int and state[0] == 1):
            self.fail("an array's state is not of version 1")
        _, shape, dtype, columns_first, data = state
        if not (isinstance(shape, tuple) and len(shape) <= MAX_AXES and all(type(n) is int and n > 0 for n in shape)):
            self.fail("an array's shape is invalid")
        if not (isinstance(dtype, _Object) and dtype.kind == "dtype" and dtype.built):
            self.fail("an array has no dtype")
        if columns_first is not False:
            self.fail("an array is stored columns first, which the release never does")
        if not isinstance(data, _Bytes) or data.size != math.prod(shape) * dtype.value[0].itemsize:
            self.fail(f"an array of shape {shape} does not have the bytes it needs")
        return StoredArray(path=self.path, offset=data.offset, shape=shape, dtype=dtype.value[0])

    def pair(self, state: Any) -> StoredPair:
        if not isinstance(state, dict) or set(state) != {"weight", "scales"}:
            self.fail("an 8-bit pair needs weight and scales")
        weight, scales = (self.finished(state[name]) for name in ("weight", "scales"))
        if weight.dtype != np.int8 or scales.dtype != jnp.bfloat16:
            self.fail(f"an 8-bit pair must be int8 and bfloat16, not {weight.dtype} and {scales.dtype}")
        return StoredPair(weight=weight, scales=scales)

    def finished(self, value: Any) -> StoredArray:
        if not (isinstance(value, _Object) and value.kind == "array" and value.built):
            self.fail("an array is incomplete")
        return value.value

    def result(self) -> StoredArray | StoredPair:
        value = self.pop()
        if self.stack or self.at != self.size:
            self.fail("data remains after the end")
        if isinstance(value, _Object) and value.kind == "pair" and value.built:
            return value.value
        return self.finished(value)


def _opcode_name(code: bytes) -> str:
    known = [opcode.name for opcode in pickletools.opcodes if opcode.code == code.decode("latin-1")]
    return f"the opcode {known[0]}" if known else f"the byte {code[0]}"


def _matches_flags(values: tuple[Any, ...], expected: tuple[int, ...]) -> bool:
    """Match False and True, or 0 and 1 as written by older numpy."""
    return all(type(value) in (bool, int) for value in values) and values == expected


def _printable(value: Any) -> str:
    """Return a name from the file for a message. Other text could contain terminal escapes; other values could be of any size."""
    return value if isinstance(value, str) and SHOWABLE.fullmatch(value) else type(value).__name__.lstrip("_")


OPCODES: dict[bytes, Callable[[_Reader], None]] = {
    **PLAIN,
    b"\x95": _Reader.frame,
    b"\x8c": lambda r: r.text(1),
    b"X": lambda r: r.text(4),
    b"\x94": _Reader.memoize,
    b"\x93": _Reader.name,
    b"\x8a": _Reader.long,
    b"C": lambda r: r.payload(1),
    b"B": lambda r: r.payload(4),
    b"\x8e": lambda r: r.payload(8),
    b"s": lambda r: r.item([r.pop(), r.pop()][::-1]),
    b"u": lambda r: r.item(r.pop_to_mark()),
    b"\x81": _Reader.new,
    b"R": _Reader.call,
    b"b": _Reader.build,
}
