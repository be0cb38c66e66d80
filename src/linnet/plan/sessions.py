"""What session traffic a cluster of replicas holds, from the bytes of a state and published figures of chips."""

from __future__ import annotations

import dataclasses

from linnet.plan.chips import Chip
from linnet.plan.serving import Serving

TURN = 256
"""Tokens of an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one replica at best: every slot busy, its tick bound by memory or by products. Of N replicas all of it is N times as much,
    for they share nothing but the store; what that must carry is N times `store_rate`."""

    sessions: int
    """Held at once in the devices' memory."""
    tick: float
    """Seconds in which each of them writes a token."""
    turns: float
    """Answers a second."""
    move: float
    """Seconds in which a session leaves for another replica over the network of its chips."""
    moved_share: float
    """Of the turns that may begin with a move before the network is the bound; 1: every one."""

    def store_rate(self, share: float, session_bytes: float) -> float:
        """Bytes a second to and from a store, where so many turns begin elsewhere: written once, read once."""
        return 2 * self.turns * share * session_bytes


def traffic(plan: Serving, chip: Chip, dtype: str) -> Traffic | None:
    """None where the weights leave no room for a slot."""
    n = plan.n_slot(chip.hbm)
    if not n:
        return None
    memory = (plan.read_bytes + n * plan.slot_bytes) / chip.hbm_bandwidth
    products = n * plan.flops_per_token / plan.n_device / chip.flops(dtype)
    tick = max(memory, products)
    turns = n / (TURN * tick)
    move = plan.session_bytes / (chip.network * plan.n_device)
    return Traffic(sessions=n, tick=tick, turns=turns, move=move, moved_share=min(1.0, 1 / (move * turns)))
