"""The result of planning a training run, serialized as JSON between the compiling process and its caller."""

from __future__ import annotations

import dataclasses
from typing import Any

from linnet.config.schema import RunConfig
from linnet.models import registry
from linnet.plan.collectives import Collective
from linnet.plan.program import Program

MAX_DEVICES = 2048
"""Maximum size of a mesh that is compiled completely: the limit of fake devices per process. Larger meshes are extrapolated from a
part of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory per device, in bytes."""

    parameters: int
    optimizer: int
    average: int
    """The EMA of the parameters."""
    codebooks: int
    carry: int
    """The state of the sequences carried between updates."""
    batch: int
    temporary: int
    """Gradients, activations and other temporaries of an update. An upper bound for bfloat16 models, because the program is compiled
    for the CPU, which computes bfloat16 in float32."""
    results: int

    @property
    def state(self) -> int:
        """Bytes that persist between updates."""
        return self.parameters + self.optimizer + self.average + self.codebooks + self.carry

    @property
    def total(self) -> int:
        return self.state + self.batch + self.temporary + self.results


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    mesh: str
    n_device: int
    rows: int
    memory: DeviceMemory
    program: Program
    """Work of one device in one update."""
    useful_flops: float
    """Model FLOPs of an update by the family's formula: over all devices, without recomputation."""
    dtype: str
    compiled_mesh: str | None
    """The smaller mesh that was compiled in place of this one, if any."""
    assumed_turns: float | None
    """Assumed trip count of loops over an expert's tokens, with a uniform load."""


def useful_flops(cfg: RunConfig) -> float:
    """Return the model FLOPs of an update: three times those of the forward pass."""
    return 3.0 * registry.get(cfg.family).flops_per_token(cfg.model) * cfg.data.batch_size * cfg.data.n_per_row


def to_json(plan: TrainingPlan) -> dict[str, Any]:
    values = dataclasses.asdict(dataclasses.replace(plan, program=dataclasses.replace(plan.program, collectives={})))
    values["program"]["collectives"] = [
        {"kind": one.kind, "bytes": one.n_bytes, "group": list(one.group), "times": times}
        for one, times in plan.program.collectives.items()
    ]
    return values


def from_json(values: dict[str, Any]) -> TrainingPlan:
    inner = dict(values["program"])
    inner["collectives"] = {
        Collective(kind=one["kind"], n_bytes=one["bytes"], group=tuple(one["group"])): one["times"]
        for one in inner["collectives"]
    }
    return TrainingPlan(**{**values, "memory": DeviceMemory(**values["memory"]), "program": Program(**inner)})
