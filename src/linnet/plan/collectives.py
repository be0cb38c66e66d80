"""Collectives of a compiled program: their kinds, bytes and device groups."""

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
PASS_THROUGH = ("bitcast", "copy", "convert", "reshape", "transpose")
Types = Mapping[tuple[Kind, tuple[int, ...], int], int]
"""Bytes per element sent, by kind, group and number of elements."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    kind: Kind
    n_bytes: float
    """Bytes of the complete array: the output of a gather, the input of a reduction."""
    group: tuple[int, ...]
    """Devices of the first replica group; all groups have the same structure."""

    @property
    def sent(self) -> float:
        """Bytes sent per device with bandwidth-optimal algorithms."""
        return sum(self.sent_by_level(math.inf))

    def sent_by_level(self, domain: float) -> tuple[float, float]:
        """Return the bytes sent per device within fast domains of `domain` neighbouring devices, and between them. A reduction across
        domains is hierarchical: reduce-scatter within each, all-reduce between them, all-gather within each."""
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
        """Return this collective on a mesh whose leading axis (of size `n_lead`) is `times` as long, with the same data per device.
        The result of a gather along that axis grows, because its shards keep their size."""
        stride = n_device // n_lead
        if self.kind == "collective-permute" or len({device // stride for device in self.group}) == 1:
            return self
        group = tuple(device + i * n_device for i in range(times) for device in self.group)
        grows = self.kind in ("all-gather", "reduce-scatter")
        return dataclasses.replace(self, group=group, n_bytes=self.n_bytes * (times if grows else 1))


def collectives_of(one: Instruction, where: Computation, module: Module, types: Types) -> list[Collective]:
    """Return the collectives of an instruction: none if it is not a collective or has only one device per group, several if the CPU
    compiler combined collectives of different kinds. `types`: element sizes before the compiler widened them for the CPU, which has
    no bfloat16 arithmetic."""
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
        if kind == "all-reduce" and _only_slices(_part(one, number, where), where, module, shape.size // len(group)):
            done = "reduce-scatter"  # accelerator compilers make this rewrite; the CPU compiler does not
        total[done] = total.get(done, 0.0) + n_bytes
    return [Collective(kind=kind, n_bytes=n_bytes, group=group) for kind, n_bytes in total.items()]


def _kind(one: Instruction) -> Kind | None:
    return next((kind for kind in KINDS if one.opcode in (kind, f"{kind}-start")), None)


def _part(one: Instruction, number: int, where: Computation) -> str:
    """Return the name of one of an instruction's output arrays."""
    if len(one.shapes) == 1:
        return one.name
    parts = (user.name for user in where.users(one.name) if user.text("index") == str(number))
    return next(parts, "")


def _carried(one: Instruction, kind: Kind) -> tuple[Shape, ...]:
    """Return the output shapes. The result of an async start is the pair of input and output."""
    if not one.opcode.endswith("-start") or kind == "all-reduce":
        return one.shapes
    return one.shapes[1:2]


def types_of(module: Module) -> Types:
    """Return the original element sizes, from the program after SPMD partitioning but before CPU-specific passes. If two arrays differ
    only in dtype, the narrower one is used."""
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


def _only_slices(name: str, where: Computation, module: Module, size: int) -> bool:
    """Return whether every user of an all-reduce reads only its own shard of the result."""
    readers = where.users(name) if name else []
    return bool(readers) and all(_slices(name, reader, where, module, size) for reader in readers)


def _slices(name: str, reader: Instruction, where: Computation, module: Module, size: int) -> bool:
    if reader.opcode == "dynamic-slice":
        return reader.operands[0] == name and reader.shapes[0].size <= size
    if reader.opcode in PASS_THROUGH:
        return _only_slices(reader.name, where, module, size)
    if reader.opcode == "fusion":
        inner = module.computations[str(reader.called("calls"))]
        numbers = [i for i, operand in enumerate(reader.operands) if operand == name]
        return all(_only_slices(inner.parameter(i), inner, module, size) for i in numbers)
    return False


def _group(one: Instruction) -> tuple[int, ...]:
    if one.opcode.startswith("collective-permute"):
        found = re.search(r"source_target_pairs=(\{\{[\d,{}]*\}\})", one.attributes)
        pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else []
        return next(((int(a), int(b)) for a, b in pairs if a != b), ())
    groups = _GROUPS.search(one.attributes)
    assert groups is not None, f"unknown notation of the replica groups of {one.name}: {one.attributes[:200]}"
    return _first_group(groups[1])


_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}"
    r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    r"|\{\{[\d,]*\})"
)


@functools.cache
def _first_group(text: str) -> tuple[int, ...]:
    """Parse the first group from any of XLA's three notations: lists, iota with a transpose, and mesh axes."""
    if text.startswith("{"):
        return tuple(map(int, re.findall(r"\d+", text)))
    if text.startswith("mesh"):
        return _first_of_mesh(text)
    shape, _, source = text.partition("<=")
    return tuple(_shuffled(source).reshape(_numbers(shape))[0].ravel().tolist())


def _first_of_mesh(text: str) -> tuple[int, ...]:
    """Return the devices that differ only in the named axes. A name may select a sub-axis: 'a':(2)4 is the four within each of two."""
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
    """Parse an iota with an optional transpose, such as `[4,2]T(1,0)`."""
    shape, _, order = text.partition("T")
    count = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return count.transpose(_numbers(order)) if order else count


def _numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))
