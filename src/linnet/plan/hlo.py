"""Parser for the HLO text of a compiled program. Covers the part of XLA's grammar that counting needs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "token": 0, "opaque": 0, "bf16": 2, "c64": 8, "c128": 16}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def n_bytes(self) -> int:
        return self.size * width(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """Shapes of the result: one per array if it is a tuple."""
    operands: tuple[str, ...]
    attributes: str

    def called(self, attribute: str) -> str | None:
        """Return the computation named by `attribute` (body, calls, ...)."""
        found = re.search(rf"{attribute}=%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    def all_called(self) -> list[str]:
        return _CALLED.findall(self.attributes) + self.branches()

    def branches(self) -> list[str]:
        found = _BRANCHES.search(self.attributes)
        if found:
            return re.findall(r"%([\w.\-]+)", found[1])
        return [name for key in ("true_computation", "false_computation") if (name := self.called(key)) is not None]

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Return an attribute's list of integers; empty if there is none."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()

    def text(self, attribute: str) -> str:
        found = re.search(rf"\b{attribute}=([^,\s]+)", self.attributes)
        return found[1] if found else ""

    @property
    def known_trips(self) -> int | None:
        """Trip count of a loop, if known to the compiler."""
        found = re.search(r'"known_trip_count":(\{[^}]*\})', self.attributes)
        return int(json.loads(found[1])["n"]) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def users(self, name: str) -> list[Instruction]:
        return [one for one in self if name in one.operands]

    def parameter(self, number: int) -> str:
        return next(one.name for one in self if one.opcode == "parameter" and one.operands == (str(number),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    computations: dict[str, Computation]
    entry: str


def width(dtype: str) -> int:
    """Return the bytes per element."""
    if dtype in BYTES:
        return BYTES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    assert bits is not None, f"unknown element type {dtype}"
    return max(1, int(bits[1]) // 8)


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = Computation(name=header[2], instructions={})
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            computations[current.name] = current
            current = None
        else:
            named = _NAMED.match(line)
            if named:
                current.instructions[named[1]] = _instruction(named[1], named[2])
    assert entry, "the HLO text has no ENTRY computation"
    return Module(computations=computations, entry=entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text[:end]))
    )
    rest = text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(
        name=name,
        opcode=rest[:opening],
        shapes=shapes,
        operands=_operands(rest[:opening], rest[opening + 1 : closing]),
        attributes=rest[closing + 1 :],
    )


def _operands(opcode: str, text: str) -> tuple[str, ...]:
    """Return the operand names; for a parameter its number, for a constant nothing."""
    if opcode == "parameter":
        return (text,)
    return tuple(re.findall(r"%([\w.\-]+)", _COMMENT.sub("", text))) if opcode != "constant" else ()


def _closing(text: str, opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    raise AssertionError(f"a bracket does not close in {text[:80]}")
