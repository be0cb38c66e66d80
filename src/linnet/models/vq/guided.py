"""Classifier-free guidance: every sequence runs twice, with and without its condition, and is sampled from the guided logits.

Letters: B sequences (2B slots: first all conditional ones, then all unconditional ones), A vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.core.pytree import pytree, replace
from linnet.models.decoder import DecodeProgram
from linnet.models.decoding import decode_program
from linnet.models.tensor_parallel import REPLICATED, ShardedModel, TensorParallel
from linnet.models.vq import decode
from linnet.models.vq import slots as one_by_one
from linnet.models.vq.config import VQConfig
from linnet.models.vq.decode_state import Prepared, VQSlots, shard_model
from linnet.models.vq.model import VQCarry
from linnet.models.vq.params import VQBuffers, VQParams
from linnet.parallel.sharding import PSpecTree

Pair = tuple[VQCarry, VQCarry]


@pytree
class CFGSlots:
    both: VQSlots  # 2B
    guidance: Float[Array, " B"] | Float[np.ndarray, " B"]

    @property
    def position(self) -> Int[Array, " B"]:
        return self.both.position[: self.guidance.shape[0]]


@dataclasses.dataclass(frozen=True)
class CFGDecoder:
    """A `Decoder` whose states are (conditional, unconditional) pairs. Guidance 1 is bit-identical to the conditional model."""

    guidance: float

    def cast_weights(self, params: VQParams) -> VQParams:
        return params

    def prepare(self, params: VQParams, buffers: VQBuffers, cfg: VQConfig) -> Prepared:
        return one_by_one.prepare(params, buffers, cfg)

    def init_slots(self, cfg: VQConfig, n: int) -> CFGSlots:
        guidance = np.full((n,), self.guidance, np.float32)  # not on a device yet: each program replicates it
        return CFGSlots(both=one_by_one.init_slots(cfg, 2 * n), guidance=guidance)

    def conditioned_state(
        self, params: VQParams, embed: Float[Array, " E"] | Float[np.ndarray, " E"], cfg: VQConfig
    ) -> Pair:
        return one_by_one.conditioned_state(params, embed, cfg), one_by_one.empty_state(cfg)

    def prefill(
        self,
        params: VQParams,
        buffers: VQBuffers,
        prompt: Sequence[int],
        cfg: VQConfig,
        state: Pair | None = None,
    ) -> Pair:
        conditional, unconditional = state or (None, None)
        read = partial(one_by_one.DECODER.prefill, params, buffers, prompt, cfg)
        return read(conditional), read(unconditional)

    def insert(self, slots: CFGSlots, one: Pair, i: int) -> CFGSlots:
        both = one_by_one.insert(slots.both, one[0], i)
        return replace(slots, both=one_by_one.insert(both, one[1], slots.guidance.shape[0] + i))

    @property
    def decode(self) -> DecodeProgram:
        return _decode


def read_token(
    prepared: Prepared, slots: CFGSlots, tokens: Int[Array, " B"], active: Any, cfg: VQConfig, tp: TensorParallel
) -> tuple[CFGSlots, Float[Array, "B A"]]:
    """Read the token in both sequences of each pair, and mix their logits."""
    both, logits = decode.read_token(prepared, slots.both, jnp.concatenate([tokens, tokens]), None, cfg, tp)
    conditional, unconditional = jnp.split(logits, 2)
    guidance = slots.guidance[:, None]
    mixed = jnp.where(guidance == 1.0, conditional, unconditional + guidance * (conditional - unconditional))
    return replace(slots, both=both), mixed


def _shard(prepared: Prepared, slots: CFGSlots, cfg: VQConfig) -> ShardedModel:
    one = shard_model(prepared, slots.both, cfg)
    return dataclasses.replace(one, slots=PSpecTree.of(CFGSlots, both=one.slots, guidance=REPLICATED))


_decode = decode_program(read_token, _shard)
