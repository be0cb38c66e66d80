"""How fast a step could be at best: the time of its products, of its memory, of its collectives; the longest of them bounds it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from linnet.plan.chips import Chip
from linnet.plan.program import Program

Bound = Literal["compute", "memory", "communication"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one step. All three could go on at once; a real step takes longer than the longest."""

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
    """`state_bytes`: what the step reads and writes once besides its products: weights, optimiser, carried state."""
    near, far = sent_by_level(program, chip)
    return Times(
        compute=program.flops / chip.flops(dtype),
        memory=(program.product_bytes + 2 * state_bytes) / chip.hbm_bandwidth,
        communication=near / chip.link + far / chip.network,
    )


def sent_by_level(program: Program, chip: Chip) -> tuple[float, float]:
    """Bytes that a device sends over its links, and over the network."""
    levels = [(one.sent_by_level(chip.domain), times) for one, times in program.collectives.items()]
    return sum(near * times for (near, _), times in levels), sum(far * times for (_, far), times in levels)


def share_of_peak(useful_flops: float, n_device: int, step: float, chip: Chip, dtype: str) -> float:
    """Useful: what the model needs, recomputation and doubled work not counted. An upper bound on what can be reached."""
    return useful_flops / (n_device * chip.flops(dtype) * step)
