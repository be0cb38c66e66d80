"""Prefill and decoding of `moe` sequences: prompts in chunks, then one token per slot and tick, without copying weights.

Letters as in `cache` and `model`; C tokens of a chunk, R = ROWS tokens of it that attention processes together, P slot-expert
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from linnet.core import quant
from linnet.core.pytree import replace
from linnet.models.decoder import Decoder
from linnet.models.decoding import decode_program, tick_program
from linnet.models.moe import cache, model
from linnet.models.moe.cache import BLOCK, MoESlots, MoEState, init_slots, insert, single_slot, to_device
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES, LayerParams, MoEParams, param_specs
from linnet.models.tensor_parallel import ShardedModel, TensorParallel, pspecs, tp_call, weight_pspecs
from linnet.nn import moe as ex
from linnet.nn.batch_invariant import COMPILER_OPTIONS
from linnet.nn.gqa import gqa_cached
from linnet.nn.linear import linear
from linnet.nn.norm import rms_norm_gain
from linnet.nn.positions import apply_rope
from linnet.nn.tiled import group_rows, moe_decode, tiled_matmul, tiled_matmul_rows

CHUNK = 512  # prefill chunk, in tokens: large enough that each expert's weights are read for many tokens
ROWS = 64
# Otherwise XLA skips roundings to bfloat16 where it can, depending on the number of slots.
OPTIONS = {**COMPILER_OPTIONS, "xla_allow_excess_precision": False}


def _shard(params: MoEParams, slots: MoESlots, cfg: MoEConfig) -> ShardedModel:
    weights = weight_pspecs(param_specs(cfg), params, RULES)
    return ShardedModel(cfg=cfg, weights=weights, slots=pspecs(cache.SLOT_AXES, slots, RULES))


def empty_state(cfg: MoEConfig) -> MoEState:
    """Return the state of an empty sequence."""
    del cfg
    return MoEState(blocks=(), n_read=0)


def abstract_state(cfg: MoEConfig, n_read: int) -> MoEState:
    """Return an abstract state for `n_read` tokens, rounded up to complete blocks and limited by the context."""
    return cache.abstract_blocks(cfg, min(n_read, cfg.context))


def chunk_len(cfg: MoEConfig) -> int:
    """Return the prefill chunk length: at most half the context, so that prefixes can be shared at chunk boundaries."""
    half = max(BLOCK, cfg.context // 2 // BLOCK * BLOCK)
    return min(CHUNK, half, -(-cfg.context // ROWS) * ROWS)


def prefill_chunk(params: MoEParams, buffers: Any, state: MoEState, tokens: Sequence[int], cfg: MoEConfig) -> MoEState:
    """Prefill at most `chunk_len(cfg)` tokens; the engine calls this between ticks. Padding costs little."""
    del buffers
    size, n_read = chunk_len(cfg), state.n_read + len(tokens)
    assert 0 < len(tokens) <= size, f"a chunk has 1 to {size} tokens, got {len(tokens)}"
    assert n_read <= cfg.context, f"{n_read} tokens do not fit a context of {cfg.context}"
    padded = np.full((size,), cfg.pad_id, np.int32)
    padded[: len(tokens)] = tokens
    one = single_slot(state, cfg)
    one, _ = _read(params, one, padded, np.int32(len(tokens)), cfg=cfg)
    return cache.extract(one, 0, n_read, state)


def chunk_logprobs(
    params: MoEParams,
    buffers: Any,
    state: MoEState,
    tokens: Int[Array, "1 C"] | Int[np.ndarray, "1 C"],
    targets: Int[Array, "1 C"] | Int[np.ndarray, "1 C"],
    *,
    cfg: MoEConfig,
    n_top: int = 0,
) -> tuple[Float[Array, " C"], tuple[Int[Array, "C n"], Float[Array, "C n"]] | None]:
    """Return the log-probability of each target given the tokens up to its position, and with `n_top` those of the most likely
    tokens there."""
    del buffers
    assert tokens.shape[1] % ROWS == 0, f"a chunk is padded to a multiple of {ROWS}, got {tokens.shape[1]}"
    one = single_slot(state, cfg)
    _, x = _read(params, one, jnp.asarray(tokens)[0], np.int32(tokens.shape[1]), cfg=cfg)
    return _logprobs(params, x, jnp.asarray(targets)[0], cfg=cfg, n_top=n_top)


@partial(jax.jit, static_argnames=("cfg", "n_top"))
def _logprobs(params: MoEParams, x: Array, targets: Array, *, cfg: MoEConfig, n_top: int) -> Any:
    logprobs = jax.nn.log_softmax(model.logits(params, x, cfg))
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    if not n_top:
        return chosen, None
    values, ids = jax.lax.top_k(logprobs, n_top)
    return chosen, (ids, values)


@partial(jax.jit, static_argnames="cfg", donate_argnames="one")
def _read(
    params: MoEParams, one: MoESlots, tokens: Int[Array, " C"], length: Int[Array, ""], *, cfg: MoEConfig
) -> tuple[MoESlots, Float[Array, "C D"]]:
    """Read `length` of these tokens into the only slot. Also returns the hidden vectors after them."""
    one, x = tp_call(_read_here, _shard, params, one, cfg, tokens, length)
    return one, x


def _read_here(
    params: MoEParams,
    one: MoESlots,
    cfg: MoEConfig,
    tp: TensorParallel,
    tokens: Int[Array, " C"],
    length: Int[Array, ""],
) -> tuple[MoESlots, Float[Array, "C D"]]:
    start = one.position[0]
    # Writes beyond the capacity are dropped: `dynamic_update_slice` would move them back onto earlier tokens.
    all_tokens = one.tokens.at[0, start + jnp.arange(tokens.shape[0])].set(tokens, mode="drop")
    experts, layers = model.expert_stack(params), replace(params.layers, experts=None)

    def layer(
        state: tuple[Array, Array, Array], inputs: tuple[LayerParams, Array]
    ) -> tuple[tuple[Array, Array, Array], None]:
        h, keys, values = state
        p, number = inputs

        def rows(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            h, keys, values = state
            part = jax.lax.dynamic_slice_in_dim(h, i * ROWS, ROWS)
            position = start + i * ROWS + jnp.arange(ROWS)
            q, k, v = model.project(part, p, position, cfg)
            keys = _write(keys, k, number, 0, position[0])
            values = _write(values, v, number, 0, position[0])

            def read(j: Array) -> tuple[Array, Array, Array]:
                real = jax.lax.dynamic_slice(all_tokens, (0, j * BLOCK), (1, BLOCK))[0] != cfg.pad_id
                return _block(keys, number, 0, j), _block(values, number, 0, j), real

            mixed = gqa_cached(q, position, read, position[-1] + 1, BLOCK, model.scores(cfg))
            y = tp.psum(linear(mixed.reshape(ROWS, -1), p.w_o), "model")
            part = part + rms_norm_gain(y, p.attention_out_gain)
            return jax.lax.dynamic_update_slice_in_dim(h, part, i * ROWS, 0), keys, values

        h, keys, values = jax.lax.fori_loop(0, -(-length // ROWS), rows, (h, keys, values))
        x = rms_norm_gain(h, p.experts_in_gain)
        routing = ex.route(x, p.router, cfg.n_choice)
        n_here = cfg.n_expert // tp.expert
        y = ex.moe_grouped(x, tp.local_routing(routing), experts, first=number * n_here, n_token=length)
        y = tp.psum(y, "model", "expert")
        return (h + rms_norm_gain(y, p.experts_out_gain), keys, values), None

    h = _embed(params, tokens, cfg, tp)
    numbers = jnp.arange(cfg.n_layer)
    (h, keys, values), _ = jax.lax.scan(layer, (h, one.keys, one.values), (layers, numbers))
    return MoESlots(keys=keys, values=values, tokens=all_tokens, position=one.position + length), h


def _tick(
    params: MoEParams,
    slots: MoESlots,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"],
    cfg: MoEConfig,
    tp: TensorParallel,
) -> tuple[MoESlots, Float[Array, "B A"]]:
    """Read one token in every active slot. Inactive slots do not advance and cost nothing."""
    # A request ends before its context does; the remaining ticks of its dispatch write into the spare block.
    position = jnp.minimum(slots.position, cache.capacity(cfg) - 1)
    at = jnp.arange(tokens.shape[0])
    read_tokens = slots.tokens.at[at, position].set(jnp.where(active, tokens, slots.tokens[at, position]))
    experts, layers = model.expert_stack(params), params.layers
    dense = group_rows(jnp.zeros_like(tokens), active)
    n_active = jnp.sum(active)

    def layer(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        h, keys, values = state
        here = replace(dense, member=jnp.full_like(dense.member, number))

        def gain(stack: Float[Array, "L D"]) -> Float[Array, " D"]:
            return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)

        x = rms_norm_gain(h, gain(layers.attention_in_gain))
        q, k, v = (
            tiled_matmul(x, w, here).reshape(len(tokens), -1, cfg.d_k) for w in (layers.w_q, layers.w_k, layers.w_v)
        )
        q, k = (apply_rope(a[:, None], position[:, None], cfg.rope_base)[:, 0] for a in (q, k))

        def slot(p: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            mixed, keys, values = state
            i = dense.order[p]
            mine, now = (jax.lax.dynamic_slice_in_dim(a, i, 1) for a in (q, position))
            keys = _write(keys, jax.lax.dynamic_slice_in_dim(k, i, 1), number, i, now[0])
            values = _write(values, jax.lax.dynamic_slice_in_dim(v, i, 1), number, i, now[0])

            def read(j: Array) -> tuple[Array, Array, Array]:
                return _block(keys, number, i, j), _block(values, number, i, j), jnp.ones((BLOCK,), bool)

            one = gqa_cached(mine, now, read, now[0] + 1, BLOCK, model.scores(cfg))
            return jax.lax.dynamic_update_slice_in_dim(mixed, one, i, 0), keys, values

        mixed, keys, values = jax.lax.fori_loop(0, n_active, slot, (jnp.zeros_like(q), keys, values))
        y = tp.psum(tiled_matmul(mixed.reshape(len(tokens), -1), layers.w_o, here), "model")
        h = h + rms_norm_gain(y, gain(layers.attention_out_gain))
        x = rms_norm_gain(h, gain(layers.experts_in_gain))
        first = tp.first_expert(cfg.n_expert)
        y = moe_decode(x, layers.router, experts, number, active, cfg.n_choice, first)
        y = tp.psum(y, "model", "expert")
        return h + rms_norm_gain(y, gain(layers.experts_out_gain)), keys, values

    state = (_embed(params, tokens, cfg, tp), slots.keys, slots.values)
    h, keys, values = jax.lax.fori_loop(0, cfg.n_layer, layer, state)
    x = rms_norm_gain(h, params.out_gain)
    scores = tiled_matmul_rows(x, params.embed, dense).astype(jnp.float32) * cfg.logit_scale
    scores = tp.all_gather_logits(scores, cfg.n_vocab)
    position = slots.position + active
    return MoESlots(keys=keys, values=values, tokens=read_tokens, position=position), scores


def _embed(params: MoEParams, tokens: Int[Array, "*B"], cfg: MoEConfig, tp: TensorParallel) -> Float[Array, "*B D"]:
    """Same as `model.embed`, for a shard of the vocabulary."""
    dtype = jnp.dtype(cfg.dtype)
    rows = quant.to_array(tp.embedding_lookup(params.embed, tokens, cfg.n_vocab), dtype)
    return rows * jnp.asarray(cfg.embed_scale, dtype)


def _write(all_keys: Array, keys: Float[Array, "R H K"], number: Array, slot: Any, position: Array) -> Array:
    """Write keys into one layer of one slot, starting at `position`."""
    fresh = keys.transpose(1, 0, 2)[None, None].astype(all_keys.dtype)
    return jax.lax.dynamic_update_slice(all_keys, fresh, (number, slot, 0, position, 0))


def _block(all_keys: Array, number: Array, slot: Any, j: Array) -> Float[Array, "H S K"]:
    _, _, n_head, _, width = all_keys.shape
    return jax.lax.dynamic_slice(all_keys, (number, slot, 0, j * BLOCK, 0), (1, 1, n_head, BLOCK, width))[0, 0]


def extract(
    params: MoEParams, slots: MoESlots, i: int, cfg: MoEConfig, n_read: int, known: MoEState | None = None
) -> MoEState:
    del params, cfg
    return cache.extract(slots, i, n_read, known)


tick = tick_program(_tick, _shard, OPTIONS)
decode = decode_program(_tick, _shard, OPTIONS)


def sharded(slots: MoESlots, cfg: MoEConfig) -> Any:
    """Return the arrays that the model axis shards."""
    del cfg
    return slots.keys, slots.values


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
    cast_weights=quant.bfloat16_as_bits,
    to_device=to_device,
    sharded_slots=sharded,
)
