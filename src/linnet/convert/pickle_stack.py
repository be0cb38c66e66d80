"""The stack machine of pickle opcodes, for readers that execute nothing: values are pushed and popped, names stay text.

Each reader defines which names, objects and calls a file may contain, and how errors are raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True)
class Name:
    """A name that Python's own unpickler would import. Here it is only compared."""

    module: str
    name: str

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.name


class _Mark:
    pass


class PickleStack:
    def __init__(self) -> None:
        self.stack: list[Any] = []

    def take(self, n: int) -> bytes:
        """Return the next bytes, or raise."""
        raise NotImplementedError

    def fail(self, why: str) -> NoReturn:
        raise NotImplementedError

    def recall(self, place: int) -> None:
        """Push the memoized value with this number."""
        raise NotImplementedError

    def number(self, n: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(n), "little", signed=signed)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            self.fail("a value is missing")
        return self.stack.pop()

    def mark(self) -> None:
        self.stack.append(_Mark())

    def pop_to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[i], _Mark):
                found = self.stack[i + 1 :]
                del self.stack[i:]
                return found
        self.fail("a mark is missing")

    def pop_tuple(self, n: int) -> None:
        self.push(tuple([self.pop() for _ in range(n)][::-1]))


PLAIN: dict[bytes, Callable[[Any], None]] = {
    b"K": lambda r: r.push(r.number(1)),
    b"M": lambda r: r.push(r.number(2)),
    b"J": lambda r: r.push(r.number(4, signed=True)),
    b"N": lambda r: r.push(None),
    b"\x88": lambda r: r.push(True),
    b"\x89": lambda r: r.push(False),
    b")": lambda r: r.push(()),
    b"}": lambda r: r.push({}),
    b"\x85": lambda r: r.pop_tuple(1),
    b"\x86": lambda r: r.pop_tuple(2),
    b"\x87": lambda r: r.pop_tuple(3),
    b"(": PickleStack.mark,
    b"t": lambda r: r.push(tuple(r.pop_to_mark())),
    b"h": lambda r: r.recall(r.number(1)),
    b"j": lambda r: r.recall(r.number(4)),
}
"""Opcodes of plain values, which mean the same in every file."""
