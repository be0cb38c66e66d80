"""What devices say to each other in one step: kinds, bytes, and between whom, as they stand in a compiled program."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np

from linnet.plan.hlo import Computation, Instruction, Module, Shape, width

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PASSED_ON = ("bitcast", "copy", "convert", "reshape", "transpose")
Types = Mapping[tuple[Kind, tuple[int, ...], int], int]
"""Bytes of an element of what is sent, by kind, group and number of elements."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    kind: Kind
    n_bytes: float
    """Of the whole array: what a gather ends with, what a reduction begins with."""
    group: tuple[int, ...]
    """Devices that take part: those of the first of the groups, which are all alike."""

    @property
    def sent(self) -> float:
        """Bytes that a device sends, by the algorithms that need the least."""
        return sum(self.sent_by_level(math.inf))

    def sent_by_level(self, domain: float) -> tuple[float, float]:
        """Within fast domains of so many neighbouring devices, and between them. A reduction across domains is done in steps:
        scattered within each, summed between them, gathered within each."""
        n_domain = len({device // domain for device in self.group})
        near = len(self.group) // n_domain
        if self.kind == "collective-permute":
            return (0.0, self.n_bytes) if n_domain > 1 else (self.n_bytes, 0.0)
        if self.kind == "all-to-all":
            size = len(self.group)
            return self.n_bytes * (near - 1) / size, self.n_bytes * (size - near) / size
        twice = 2 if self.kind == "all-reduce" else 1
        within = twice * self.n_bytes * (near - 1) / near
        return within, twice * self.n_bytes * (n_domain - 1) / n_domain / near

    def on_more_rows(self, n_device: int, n_lead: int, times: int) -> Collective:
        """The same on a mesh whose leading axis (of `n_lead`) is `times` as long and whose devices hold what they held. A gather
        along that axis ends with more: its parts are as large as before."""
        stride = n_device // n_lead
        if self.kind == "collective-permute" or len({device // stride for device in self.group}) == 1:
            return self
        group = tuple(device + i * n_device for i in range(times) for device in self.group)
        grows = self.kind in ("all-gather", "reduce-scatter")
        return dataclasses.replace(self, group=group, n_bytes=self.n_bytes * (times if grows else 1))


def collectives_of(one: Instruction, where: Computation, module: Module, types: Types) -> list[Collective]:
    """None where the instruction is no collective, or where nobody else takes part; several where this machine's compiler joined
    what others would do in different ways. `types`: what was sent before the compiler widened it for this machine, which has no
    bfloat16 arithmetic."""
    kind = _kind(one)
    if kind is None:
        return []
    group = _group(one)
    if len(group) < 2:
        return []
    total: dict[Kind, float] = {}
    for number, shape in enumerate(_carried(one, kind)):
        element = width(shape.dtype)
        n_bytes, done = float(shape.size * min(element, types.get((kind, group, shape.size), element))), kind
        if kind == "reduce-scatter":
            n_bytes *= len(group)
        if kind == "all-reduce" and _only_cut(_part(one, number, where), where, module, shape.size // len(group)):
            done = "reduce-scatter"  # compilers for accelerators make it one; the one for CPUs does not
        total[done] = total.get(done, 0.0) + n_bytes
    return [Collective(kind=kind, n_bytes=n_bytes, group=group) for kind, n_bytes in total.items()]


def _kind(one: Instruction) -> Kind | None:
    return next((kind for kind in KINDS if one.opcode in (kind, f"{kind}-start")), None)


def _part(one: Instruction, number: int, where: Computation) -> str:
    """The name of one of the arrays that an instruction gives."""
    if len(one.shapes) == 1:
        return one.name
    parts = (user.name for user in where.users(one.name) if user.text("index") == str(number))
    return next(parts, "")


def _carried(one: Instruction, kind: Kind) -> tuple[Shape, ...]:
    """A start's result is a pair of what goes in and what comes out."""
    if not one.opcode.endswith("-start") or kind == "all-reduce":
        return one.shapes
    return one.shapes[1:2]


def types_of(module: Module) -> Types:
    """The true types of what is sent, from a program that was cut for its devices but not yet fitted to this machine. Of two arrays
    alike in all but their types the narrower one decides."""
    types: dict[tuple[Kind, tuple[int, ...], int], int] = {}
    for computation in module.computations.values():
        for one in computation:
            kind = _kind(one)
            if kind is None:
                continue
            for shape in one.shapes:
                key = (kind, _group(one), shape.size)
                types[key] = min(width(shape.dtype), types.get(key, 8))
    return types


def _only_cut(name: str, where: Computation, module: Module, size: int) -> bool:
    """Whether every reader of a sum takes no more than its own share of it."""
    readers = where.users(name) if name else []
    return bool(readers) and all(_cuts(name, reader, where, module, size) for reader in readers)


def _cuts(name: str, reader: Instruction, where: Computation, module: Module, size: int) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name and reader.shapes[0].size <= size
    if reader.opcode in PASSED_ON:
        return _only_cut(reader.name, where, module, size)
    if reader.opcode == "fusion":
        inner = module.computations[str(reader.called("calls"))]
        numbers = [i for i, operand in enumerate(reader.operands) if operand == name]
        return all(_only_cut(inner.parameter(i), inner, module, size) for i in numbers)
    return False


def _group(one: Instruction) -> tuple[int, ...]:
    if one.opcode.startswith("collective-permute"):
        found = re.search(r"source_target_pairs=(\{\{[\d,{}]*\}\})", one.attributes)
        pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else []
        return next(((int(a), int(b)) for a, b in pairs if a != b), ())
    found = _GROUPS.search(one.attributes)
    assert found is not None, (
        f"groups of {one.name} are written in a way that nobody here can read: {one.attributes[:200]}"
    )
    return _first_group(found[1])


_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}"
    r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    r"|\{\{[\d,]*\})"
)


@functools.cache
def _first_group(text: str) -> tuple[int, ...]:
    """All of XLA's three ways to write groups: lists, a shuffled count, and axes of a mesh."""
    if text.startswith("{"):
        return tuple(map(int, re.findall(r"\d+", text)))
    if text.startswith("mesh"):
        return _first_of_mesh(text)
    shape, _, source = text.partition("<=")
    return tuple(_shuffled(source).reshape(_numbers(shape))[0].ravel().tolist())


def _first_of_mesh(text: str) -> tuple[int, ...]:
    """The devices that differ only in the named axes. A name may stand for a part of its axis, as 'a':(2)4: the four within each of
    two."""
    axes, chosen = text.split("{")
    given, _, ids = axes.partition("]")
    names = re.findall(r"'(\w+)'=(\d+)", given)
    wanted = {name: (int(before or 1), int(size or 0)) for name, before, size in _CHOSEN.findall(chosen)}
    sizes: list[int] = []
    index: list[int | slice] = []
    for name, length in names:
        before, size = wanted.get(name, (1, 1))
        size = size or int(length)
        sizes += [before, size, int(length) // before // size]
        index += [0, slice(None) if name in wanted else 0, 0]
    source = re.search(r"device_ids=\(([^ ]*)\)", ids)
    count = _shuffled(source[1]) if source else np.arange(math.prod(sizes))
    return tuple(count.reshape(sizes)[tuple(index)].ravel().tolist())


_CHOSEN = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def _shuffled(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: counted in one order, read in another."""
    shape, _, order = text.partition("T")
    count = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return count.transpose(_numbers(order)) if order else count


def _numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))
