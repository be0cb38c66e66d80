"""Cost analysis of a compiled program from its HLO text: matmul FLOPs, collectives and bytes moved per call.

XLA's own cost analysis counts a loop body once; here it is multiplied by the trip count. As usual, only matmuls count as FLOPs
(not norms, exponentials or sorting).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from linnet.plan.collectives import Collective, Types, collectives_of, types_of
from linnet.plan.hlo import Computation, Instruction, Module, parse, width


class UnknownTrips(ValueError):
    """The trip count of a loop depends on data, and no count was given for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Costs of one call on one device."""

    flops: float
    product_bytes: float
    """Bytes read and written by matmuls: the memory traffic if everything else is fused into them."""
    collectives: dict[Collective, float]
    """Each collective with its number of executions."""
    n_assumed: int
    """Number of loops whose trip count was assumed."""

    def sent(self) -> float:
        return sum(one.sent * times for one, times in self.collectives.items())

    def sent_by_kind(self) -> dict[str, float]:
        kinds: dict[str, float] = {}
        for one, times in self.collectives.items():
            kinds[one.kind] = kinds.get(one.kind, 0.0) + one.sent * times
        return kinds


Trips = Callable[[Instruction], float]


def read(
    text: str, *, partitioned_hlo: str | None = None, trips: Trips | None = None, element: int | None = None
) -> Program:
    """Analyze a program. `partitioned_hlo`: its HLO before CPU-specific passes, for the original dtypes of collectives.
    `trips`: trip counts of data-dependent loops; without it such a loop is an error. `element`: maximum bytes per element in matmuls,
    if the model's dtype is narrower than what the CPU computes in."""
    module = parse(text)
    types = types_of(parse(partitioned_hlo)) if partitioned_hlo is not None else {}
    return _Reader(module, types, trips, element).of(module.entry)


class _Reader:
    def __init__(self, module: Module, types: Types, trips: Trips | None, element: int | None) -> None:
        self.module, self.types, self.trips, self.element = module, types, trips, element
        self.known: dict[str, Program] = {}

    def of(self, name: str) -> Program:
        if name not in self.known:
            computation = self.module.computations[name]
            total = _NOTHING
            for one in computation:
                total = _plus(total, self._one(one, computation), 1)
            self.known[name] = total
        return self.known[name]

    def _one(self, one: Instruction, where: Computation) -> Program:
        if one.opcode == "while":
            return self._loop(one)
        if one.opcode == "conditional":  # count the most expensive branch
            return max(map(self.of, one.branches()), key=lambda branch: (branch.flops, branch.sent()))
        if one.opcode in ("fusion", "call", "async-start"):
            return _sum([self.of(name) for name in one.all_called()])
        if one.opcode == "dot":
            return self._product(one, where)
        assert one.opcode != "convolution", "convolutions are not counted, because no model here has one"
        collectives = collectives_of(one, where, self.module, self.types)
        return dataclasses.replace(_NOTHING, collectives=dict.fromkeys(collectives, 1.0)) if collectives else _NOTHING

    def _loop(self, one: Instruction) -> Program:
        turns: float | None = one.known_trips
        assumed = turns is None
        if turns is None:
            if self.trips is None:
                raise UnknownTrips(
                    f"loop {one.name} has a data-dependent trip count: pass `trips` with the count to assume"
                )
            turns = self.trips(one)
        inside = _sum([self.of(name) for name in one.all_called()])
        total = _plus(_NOTHING, inside, turns)
        return dataclasses.replace(total, n_assumed=inside.n_assumed + assumed)

    def _product(self, one: Instruction, where: Computation) -> Program:
        left = where.instructions[one.operands[0]].shapes[0]
        summed = math.prod(left.dims[i] for i in one.numbers("lhs_contracting_dims"))
        arrays = [one.shapes[0], *(where.instructions[name].shapes[0] for name in one.operands)]
        moved = sum(shape.size * min(width(shape.dtype), self.element or 8) for shape in arrays)
        return dataclasses.replace(_NOTHING, flops=2.0 * one.shapes[0].size * summed, product_bytes=float(moved))


_NOTHING = Program(flops=0.0, product_bytes=0.0, collectives={}, n_assumed=0)


def _sum(programs: list[Program]) -> Program:
    total = _NOTHING
    for one in programs:
        total = _plus(total, one, 1)
    return total


def _plus(total: Program, more: Program, times: float) -> Program:
    if more is _NOTHING:
        return total
    collectives = dict(total.collectives)
    for one, n in more.collectives.items():
        collectives[one] = collectives.get(one, 0.0) + n * times
    return Program(
        flops=total.flops + times * more.flops,
        product_bytes=total.product_bytes + times * more.product_bytes,
        collectives=collectives,
        n_assumed=total.n_assumed + more.n_assumed,
    )


def on_more_rows(program: Program, n_device: int, n_lead: int, times: int) -> Program:
    """Extrapolate from a mesh of `n_device` devices to one whose leading axis (of size `n_lead`) and rows are `times` as many."""
    collectives: dict[Collective, float] = {}
    for one, n in program.collectives.items():
        more = one.on_more_rows(n_device, n_lead, times)
        collectives[more] = collectives.get(more, 0.0) + n
    return dataclasses.replace(program, collectives=collectives)
