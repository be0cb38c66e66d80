"""Session capacity of a cluster of replicas, from the session state's size and published chip specifications."""

from __future__ import annotations

import dataclasses

from linnet.plan.chips import Chip
from linnet.plan.serving import ServingPlan

TURN = 256
"""Tokens per response."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Best case of one replica: every slot is busy, and a tick is bound by memory or compute. N replicas have N times the capacity,
    because they share only the store, whose load is N times `store_rate`."""

    sessions: int
    """Concurrent sessions in device memory."""
    tick: float
    """Seconds per tick, in which each session generates one token."""
    turns: float
    """Responses per second."""
    move: float
    """Seconds to move a session to another replica over the network."""
    moved_share: float
    """Fraction of turns that can begin with a move before the network is the bottleneck; 1: all of them."""

    def store_rate(self, share: float, session_bytes: float) -> float:
        """Return the bytes per second to and from a store if this fraction of turns moves replica (one write and one read each)."""
        return 2 * self.turns * share * session_bytes


def traffic(plan: ServingPlan, chip: Chip, dtype: str) -> Traffic | None:
    """Return the traffic of one replica, or None if no slot fits beside the weights."""
    n = plan.n_slot(chip.hbm)
    if not n:
        return None
    memory = (plan.read_bytes + n * plan.slot_bytes) / chip.hbm_bandwidth
    products = n * plan.flops_per_token / plan.n_device / chip.flops(dtype)
    tick = max(memory, products)
    turns = n / (TURN * tick)
    move = plan.session_bytes / (chip.network * plan.n_device)
    return Traffic(sessions=n, tick=tick, turns=turns, move=move, moved_share=min(1.0, 1 / (move * turns)))
