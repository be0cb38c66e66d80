"""Classifier-free guidance: every sequence runs twice, with and without its condition, and is sampled from the guided logits.

Letters: B sequences (2B slots: first all conditional ones, then all unconditional ones), A vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.core.pytree import pytree, replace
from linnet.models import decoding as drawing
from linnet.models.tensor_parallel import EVERYWHERE, Parts
from linnet.models.vq import slots as one_by_one
from linnet.models.vq.config import VQConfig
from linnet.models.vq.decode import read_token
from linnet.models.vq.decode_state import Prepared, Slots, by_parts, slot_cuts
from linnet.models.vq.model import VQCarry
from linnet.models.vq.params import VQBuffers, VQParams
from linnet.nn.batch_invariant import COMPILER_OPTIONS
from linnet.nn.sampling import LogitMask, SamplingSettings

Pair = tuple[VQCarry, VQCarry]


@pytree
class CFGSlots:
    both: Slots  # 2B
    guidance: Float[Array, " B"]

    @property
    def position(self) -> Int[Array, " B"]:
        return self.both.position[: self.guidance.shape[0]]


@dataclasses.dataclass(frozen=True)
class CFGDecoder:
    """A `Decoder` whose states are (conditional, unconditional) pairs. Guidance 1 is bit-identical to the conditional model."""

    guidance: float

    def hold(self, params: VQParams) -> VQParams:
        return params

    def prepare(self, params: VQParams, buffers: VQBuffers, cfg: VQConfig) -> Prepared:
        return one_by_one.prepare(params, buffers, cfg)

    def init_slots(self, cfg: VQConfig, n: int) -> CFGSlots:
        return CFGSlots(
            both=one_by_one.init_slots(cfg, 2 * n), guidance=cast(Any, np.full((n,), self.guidance, np.float32))
        )

    def conditioned_state(self, params: VQParams, embed: Float[Array, " E"], cfg: VQConfig) -> Pair:
        return one_by_one.conditioned_state(params, embed, cfg), one_by_one.empty_state(cfg)

    def admit(
        self,
        params: VQParams,
        buffers: VQBuffers,
        prompt: Sequence[int],
        cfg: VQConfig,
        state: Pair | None = None,
    ) -> Pair:
        told, untold = state or (None, None)
        read = partial(one_by_one.admit, params, buffers, prompt, cfg)
        return read(told), read(untold)

    def insert(self, slots: CFGSlots, one: Pair, i: int) -> CFGSlots:
        both = one_by_one.insert(slots.both, one[0], i)
        return replace(slots, both=one_by_one.insert(both, one[1], slots.guidance.shape[0] + i))

    def decode(self, *given: Any, **options: Any) -> Any:
        return decode(*given, **options)


@partial(
    jax.jit,
    static_argnames=("cfg", "n_ticks", "n_top"),
    donate_argnames=("slots", "seen"),
    compiler_options=COMPILER_OPTIONS,
)
def decode(
    prepared: Prepared,
    slots: CFGSlots,
    tokens: Int[Array, " B"],
    settings: SamplingSettings,
    keys: PRNGKeyArray,
    seen: Int[Array, "B A"],
    rules: LogitMask | None = None,
    active: Any = None,
    n: int | Int[Array, ""] | None = None,
    *,
    cfg: VQConfig,
    n_ticks: int,
    n_top: int = 0,
) -> tuple[CFGSlots, Int[Array, "B A"], Int[Array, "n B"], Float[Array, "n B"], tuple[Array, Array] | None]:
    """Run `decode_loop`; both sequences of a pair read the sampled token."""
    del active

    def run(
        prepared: Prepared, slots: CFGSlots, cfg: VQConfig, of: Parts, tokens: Any, settings: Any, keys: Any, *rest: Any
    ) -> tuple[Any, ...]:
        seen, rules, n = rest

        def one(slots: CFGSlots, tokens: Int[Array, " B"]) -> tuple[CFGSlots, Float[Array, "B A"]]:
            both, logits = read_token(prepared, slots.both, jnp.concatenate([tokens, tokens]), cfg, of)
            told, untold = jnp.split(logits, 2)
            guidance = slots.guidance[:, None]
            mixed = jnp.where(guidance == 1.0, told, untold + guidance * (told - untold))
            return replace(slots, both=both), mixed

        return drawing.decode_loop(one, slots, tokens, settings, keys, seen, rules, n_ticks, n_top, n)

    cut = CFGSlots(both=slot_cuts(cfg.n_head, cfg.n_unit), guidance=cast(Any, EVERYWHERE))
    return cast(Any, by_parts(run, prepared, slots, cfg, cut, tokens, settings, keys, seen, rules, n))
