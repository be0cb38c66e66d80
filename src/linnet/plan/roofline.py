"""Roofline model: a lower bound of the step time from compute, memory and communication."""

from __future__ import annotations

import dataclasses
from typing import Literal

from linnet.plan.chips import Chip
from linnet.plan.program import Program

Bound = Literal["compute", "memory", "communication"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per step. All three can overlap; a real step takes longer than the longest of them."""

    compute: float
    memory: float
    communication: float

    @property
    def step(self) -> float:
        return max(self.compute, self.memory, self.communication)

    @property
    def bound(self) -> Bound:
        times: dict[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory,
            "communication": self.communication,
        }
        return max(times, key=lambda name: times[name])


def times(program: Program, state_bytes: float, chip: Chip, dtype: str) -> Times:
    """Return the roofline times. `state_bytes` (weights, optimizer, carried state) are read and written once per step."""
    near, far = sent_by_level(program, chip)
    return Times(
        compute=program.flops / chip.flops(dtype),
        memory=(program.product_bytes + 2 * state_bytes) / chip.hbm_bandwidth,
        communication=near / chip.link + far / chip.network,
    )


def sent_by_level(program: Program, chip: Chip) -> tuple[float, float]:
    """Return the bytes that a device sends over its links, and over the network."""
    levels = [(one.sent_by_level(chip.domain), times) for one, times in program.collectives.items()]
    return sum(near * times for (near, _), times in levels), sum(far * times for (_, far), times in levels)


def share_of_peak(useful_flops: float, n_device: int, step: float, chip: Chip, dtype: str) -> float:
    """Return the upper bound of the model FLOPs utilization (MFU). Recomputation and replicated work are not counted as useful."""
    return useful_flops / (n_device * chip.flops(dtype) * step)
