"""Slots of decoding `vq` sequences: a fixed number of slots, each of constant size for any sequence length.

Letters: B slots, H heads, R = B H rows, S codes, M window, W = M + 1 ring columns, N = S + W columns, V value width, G units,
E width of a condition.

A row's memory is N columns. Each has a code, a count of keys and the sum of their values: the first S are the table (column s
holds all old keys of code s), the other W are a ring buffer of single keys. The token at position p is in ring column p mod W; when
that column is reused, the old key moves to the table. So a slot's bits depend only on its own tokens, not on its neighbours, its
index, or its admission time; extracting a slot and inserting it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.core.pytree import replace
from linnet.models.decoder import Decoder
from linnet.models.tensor_parallel import REPLICATED, constrain, pspecs
from linnet.models.vq.config import VQConfig
from linnet.models.vq.decode import code_vectors, decode, evict_from_ring, prepare, table_size
from linnet.models.vq.decode_state import (
    Prepared,
    UnitMemory,
    UnitWeights,
    VQSlots,
    prepared_pspecs,
    shard_config,
    slot_pspecs,
)
from linnet.models.vq.model import VQCarry, carry_axes, conditioned, empty_carry, forward, logits, nats
from linnet.models.vq.params import RULES, VQBuffers, VQParams
from linnet.nn import codebook
from linnet.nn.losses import top_logprobs
from linnet.nn.vq_attention import AttentionState
from linnet.nn.vq_attention_scan import EMPTY
from linnet.parallel import sharding
from linnet.parallel.sharding import PSpecTree, shard_map

CHUNK = 128  # minimum prefill chunk, in tokens
SHORT = 32  # last chunks up to this length use a smaller program, so that short messages are cheap
DOCUMENT = 0  # id of a slot's current document; older documents are dropped


def init_slots(cfg: VQConfig, n: int) -> VQSlots:
    """Return `n` empty slots."""
    return _empty_slots(cfg, n) if sharding.current() is None else _slots_on_mesh(cfg, n)


@partial(jax.jit, static_argnames=("cfg", "n"))
def _slots_on_mesh(cfg: VQConfig, n: int) -> VQSlots:
    shard_cfg = shard_config(cfg)
    return shard_map(lambda: _empty_slots(shard_cfg, n), (), (), slot_pspecs(cfg.n_head, cfg.n_unit))


def _empty_slots(cfg: VQConfig, n: int) -> VQSlots:
    rows, ring, columns = n * cfg.n_head, cfg.mem_len + 1, table_size(cfg) + cfg.mem_len + 1
    return VQSlots(
        units=tuple(
            UnitMemory(
                total=jnp.zeros((rows, columns, cfg.d_v), jnp.float32),
                codes=jnp.zeros((rows, ring), jnp.int32),
                count=jnp.zeros((rows, columns), jnp.float32),
            )
            for _ in range(cfg.n_unit)
        ),
        position=jnp.zeros((n,), jnp.int32),
        condition=jnp.zeros((n, cfg.d_model), jnp.float32) if cfg.d_condition else None,
    )


def empty_state(cfg: VQConfig) -> VQCarry:
    """Return the state of an empty sequence."""
    return empty_carry(cfg, 1)


@partial(jax.jit, static_argnames="cfg")
def conditioned_state(params: VQParams, embed: Float[Array, " E"], cfg: VQConfig) -> VQCarry:
    """Return the state of an empty sequence conditioned on a unit-norm embedding."""
    one = conditioned(params, empty_carry(cfg, 1), embed[None], cfg)
    return constrain(carry_axes(one), one, RULES)


@jax.jit
def to_device(one: VQCarry) -> VQCarry:
    """Move a state from elsewhere to the devices, sharded as the programs expect it."""
    return constrain(carry_axes(one), one, RULES)


def abstract_state(cfg: VQConfig, n_read: int) -> VQCarry:
    """Return a state of the right shapes, which do not depend on the tokens read."""
    del n_read
    return empty_carry(cfg, 1)


def prefill_chunk(
    params: VQParams, buffers: VQBuffers, carry: VQCarry, tokens: Sequence[int], cfg: VQConfig
) -> VQCarry:
    """Prefill at most `chunk_len(cfg)` tokens; the engine calls this between ticks."""
    size = chunk_len(cfg)
    assert 0 < len(tokens) <= size, f"a chunk has 1 to {size} tokens, got {len(tokens)}"
    size = min(size, SHORT) if len(tokens) <= SHORT else size
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    block_len = min(size, cfg.block_len)
    return _read(params, buffers, carry, padded, np.asarray([len(tokens)], np.int32), cfg=cfg, block_len=block_len)


def chunk_len(cfg: VQConfig) -> int:
    return max(cfg.block_len, CHUNK // cfg.block_len * cfg.block_len)


@partial(jax.jit, static_argnames=("cfg", "block_len"))
def _read(
    params: VQParams,
    buffers: VQBuffers,
    carry: VQCarry,
    tokens: Int[Array, "1 C"],
    length: Int[Array, " 1"],
    *,
    cfg: VQConfig,
    block_len: int,
) -> VQCarry:
    documents = _documents(carry, tokens, cfg)
    after = forward(params, buffers, tokens, carry, cfg, documents=documents, length=length, block_len=block_len)[1]
    return constrain(carry_axes(after), after, RULES)


def _documents(carry: VQCarry, tokens: Int[Array, "1 C"], cfg: VQConfig) -> Int[Array, "1 C"]:
    """Number the tokens' documents from the state's current one; each EOS starts a new document."""
    begun = jnp.maximum(carry.attention.table_document[0], DOCUMENT)  # the first unit's; all units agree
    return begun[:, None] + jnp.cumsum(tokens == cfg.end_id, axis=1)


@partial(jax.jit, static_argnames=("cfg", "n_top"))
def chunk_logprobs(
    params: VQParams,
    buffers: VQBuffers,
    carry: VQCarry,
    tokens: Int[Array, "1 C"],
    targets: Int[Array, "1 C"],
    *,
    cfg: VQConfig,
    n_top: int = 0,
) -> tuple[Float[Array, " C"], tuple[Int[Array, "C K"], Float[Array, "C K"]] | None]:
    """Return the log-probability of each target given the tokens up to its position; padding at the end changes nothing before it. The
    carry is left to `prefill_chunk`, so that a state's bits do not depend on whether log-probabilities were requested. With `n_top`,
    also return the `n_top` most likely tokens at each position with their log-probabilities."""
    x, _, _ = forward(params, buffers, tokens, carry, cfg, documents=_documents(carry, tokens, cfg))
    chosen = -nats(params, x, targets, cfg)[0]
    if not n_top:
        return chosen, None
    return chosen, top_logprobs(logits(params, x, cfg)[0], n_top)


@partial(jax.jit, donate_argnums=0)
def insert(slots: VQSlots, one: VQCarry, i: int | Int[Array, ""]) -> VQSlots:
    """Insert a sequence into slot `i`; other slots are not changed."""
    if sharding.current() is None:
        return _insert(slots, one, i)
    of_slots, of_one = _slot_pspecs_of(slots), pspecs(carry_axes(one), one, RULES)
    return shard_map(_insert, (slots, one, jnp.asarray(i)), (of_slots, of_one, REPLICATED), of_slots)


def _slot_pspecs_of(slots: VQSlots) -> PSpecTree[VQSlots]:
    """Return the slots' PartitionSpecs: sharded by heads if there are several rows per slot."""
    n_head = slots.units[0].codes.shape[0] // slots.position.shape[0]
    return slot_pspecs(n_head, len(slots.units))


def _insert(slots: VQSlots, one: VQCarry, i: int | Int[Array, ""]) -> VQSlots:
    n_slot = slots.position.shape[0]
    position = one.position[0]

    def put(memory: UnitMemory, state: AttentionState) -> UnitMemory:
        ring = memory.codes.shape[1]
        window, n_head = ring - 1, memory.codes.shape[0] // n_slot
        column = (jnp.arange(ring) - (position - window)) % ring  # window index; one past its end is the free column
        real = (state.documents[0] != EMPTY) & (state.documents[0] == state.table_document[0])
        real = jnp.broadcast_to(real.astype(jnp.float32), (n_head, window))
        n_table = memory.count.shape[1] - ring  # none without the cache

        def ringed(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))[:, column]

        total = jnp.concatenate([state.total[0, :, :n_table], ringed(state.values[0]).astype(jnp.float32)], axis=1)
        count = jnp.concatenate([state.count[0, :, :n_table], ringed(real)], axis=1)
        row = i * n_head
        return UnitMemory(
            total=jax.lax.dynamic_update_slice(memory.total, total, (row, 0, 0)),
            codes=jax.lax.dynamic_update_slice(memory.codes, ringed(state.codes[0]), (row, 0)),
            count=jax.lax.dynamic_update_slice(memory.count, count, (row, 0)),
        )

    units = tuple(put(memory, jax.tree.map(lambda x, g=g: x[g], one.attention)) for g, memory in enumerate(slots.units))
    condition = slots.condition
    if condition is not None:
        assert one.condition is not None
        condition = condition.at[i].set(one.condition[0])
    return VQSlots(units=units, position=slots.position.at[i].set(position), condition=condition)


@partial(jax.jit, static_argnames="cfg")
def single_slot(one: VQCarry, cfg: VQConfig) -> VQSlots:
    """Return a single slot that holds this sequence."""
    return insert(init_slots(cfg, 1), one, 0)


@partial(jax.jit, static_argnames="cfg")
def extract(
    prepared: Prepared,
    slots: VQSlots,
    i: int | Int[Array, ""],
    cfg: VQConfig,
    n_read: int | Int[Array, ""] = 0,
    known: VQCarry | None = None,
) -> VQCarry:
    """Return the sequence in slot `i` as a state; inserting it again is bit-identical to never having extracted it. `n_read` and
    `known` are unused in this family."""
    del n_read, known
    if sharding.current() is None:
        return _extract(prepared, slots, i, cfg)
    shard_cfg, one = shard_config(cfg), jax.eval_shape(lambda: empty_carry(cfg, 1))
    out = pspecs(carry_axes(one), one, RULES)
    ins = (prepared_pspecs(cfg), _slot_pspecs_of(slots), REPLICATED)
    return shard_map(lambda p, slots, i: _extract(p, slots, i, shard_cfg), (prepared, slots, jnp.asarray(i)), ins, out)


def _extract(prepared: Prepared, slots: VQSlots, i: int | Int[Array, ""], cfg: VQConfig) -> VQCarry:
    position = slots.position[i]
    window, n_table = cfg.mem_len, table_size(cfg)
    ring = window + 1
    column = (position - window + jnp.arange(window)) % ring

    def take(weights: UnitWeights, memory: UnitMemory) -> AttentionState:
        memory = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * cfg.n_head, cfg.n_head), memory)
        memory, _ = evict_from_ring(memory, jnp.broadcast_to(position % ring, (cfg.n_head,)))
        count = jnp.pad(memory.count[:, :n_table], [(0, 0), (0, cfg.n_code - n_table)])
        total = jnp.pad(memory.total[:, :n_table], [(0, 0), (0, cfg.n_code - n_table), (0, 0)])
        real = memory.count[0, n_table + column] > 0  # the same for every head
        codes = memory.codes[None, :, column]

        def only_real(x: Float[Array, "1 H M E"]) -> Array:
            return jnp.where(real[:, None], x, 0).astype(cfg.dtype)

        return AttentionState(
            codes=codes,
            keys=only_real(codebook.lookup(code_vectors(weights, cfg), codes)),
            values=only_real(memory.total[None, :, n_table + column]),
            documents=jnp.where(real, DOCUMENT, EMPTY).astype(jnp.int32)[None],
            count=count[None],
            total=jnp.where(count[..., None] > 0, total, 0)[None],
            table_document=jnp.where(jnp.any(real), DOCUMENT, EMPTY).astype(jnp.int32)[None],
        )

    units = [take(weights, memory) for weights, memory in zip(prepared.units, slots.units, strict=True)]
    return VQCarry(
        attention=jax.tree.map(lambda *x: jnp.stack(x), *units),
        position=position[None],
        condition=None if slots.condition is None else slots.condition[i][None],
    )


@partial(jax.jit, donate_argnums=0)
def clear(slots: VQSlots, i: int | Int[Array, ""]) -> VQSlots:
    """Empty slot `i`. A count of zero masks whatever the columns contain."""
    if sharding.current() is None:
        return _clear(slots, i)
    return shard_map(_clear, (slots, jnp.asarray(i)), (_slot_pspecs_of(slots), REPLICATED), _slot_pspecs_of(slots))


def _clear(slots: VQSlots, i: int | Int[Array, ""]) -> VQSlots:
    n_slot = slots.position.shape[0]

    def empty(memory: UnitMemory) -> UnitMemory:
        n_head = memory.count.shape[0] // n_slot
        zeros = jnp.zeros((n_head, memory.count.shape[1]), jnp.float32)
        return replace(memory, count=jax.lax.dynamic_update_slice(memory.count, zeros, (i * n_head, 0)))

    condition = None if slots.condition is None else slots.condition.at[i].set(0.0)
    return VQSlots(units=tuple(map(empty, slots.units)), position=slots.position.at[i].set(0), condition=condition)


def sharded(slots: VQSlots, cfg: VQConfig) -> Any:
    """Return the arrays that the model axis shards: everything per head, or the values of a single head."""
    return slots.units if cfg.n_head > 1 else [unit.total for unit in slots.units]


DECODER = Decoder(
    init_slots=init_slots,
    empty_state=empty_state,
    abstract_state=abstract_state,
    chunk_len=chunk_len,
    prefill_chunk=prefill_chunk,
    chunk_logprobs=chunk_logprobs,
    insert=insert,
    single_slot=single_slot,
    extract=extract,
    decode=decode,
    prepare=prepare,
    copies_weights=True,
    to_device=to_device,
    sharded_slots=sharded,
    conditioned_state=conditioned_state,
)
