"""What a plan says: plain figures, which go from the process that compiles to the one that asked as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from linnet.config.schema import RunConfig
from linnet.models import registry
from linnet.models.prior.config import PriorConfig
from linnet.plan.collectives import Collective
from linnet.plan.program import Program

MAX_DEVICES = 2048
"""Of a mesh that is compiled whole: one process cannot pretend to have more. A part stands for a larger one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: int
    optimizer: int
    average: int
    """The moving average of the parameters."""
    codebooks: int
    carry: int
    """The state of the sequences between two updates."""
    batch: int
    temporary: int
    """Gradients, activations and whatever else lives only within an update. Compiled for this machine, which computes bfloat16 in
    float32: of such a model this is an upper bound."""
    results: int

    @property
    def state(self) -> int:
        """What lives between two updates."""
        return self.parameters + self.optimizer + self.average + self.codebooks + self.carry

    @property
    def total(self) -> int:
        return self.state + self.batch + self.temporary + self.results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    mesh: str
    n_device: int
    rows: int
    memory: Memory
    program: Program
    """What one device does in one update."""
    useful_flops: float
    """That the model needs for an update, by its family's formula: all devices together, nothing computed twice."""
    dtype: str
    compiled_mesh: str | None
    """The smaller mesh that stood for this one."""
    assumed_turns: float | None
    """Of loops over an expert's tokens: all experts chosen equally often."""


def useful_flops(cfg: RunConfig) -> float:
    """Of an update: three times the forward pass."""
    per_row = 1 if isinstance(cfg.model, PriorConfig) else cfg.tokens.update_len
    return 3.0 * registry.get(cfg.family).flops_per_token(cfg.model) * cfg.data.batch_size * per_row


def to_json(plan: Plan) -> dict[str, Any]:
    values = dataclasses.asdict(dataclasses.replace(plan, program=dataclasses.replace(plan.program, collectives={})))
    values["program"]["collectives"] = [
        {"kind": one.kind, "bytes": one.n_bytes, "group": list(one.group), "times": times}
        for one, times in plan.program.collectives.items()
    ]
    return values


def from_json(values: dict[str, Any]) -> Plan:
    inner = dict(values["program"])
    inner["collectives"] = {
        Collective(kind=one["kind"], n_bytes=one["bytes"], group=tuple(one["group"])): one["times"]
        for one in inner["collectives"]
    }
    return Plan(**{**values, "memory": Memory(**values["memory"]), "program": Program(**inner)})
