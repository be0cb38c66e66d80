"""Decode step of `vq`: one token per slot. Reading the state dominates the cost, so nothing is copied and updates are in place.

Letters as in `slots`: B slots, H heads, R = B H rows, S codes, M window, W = M + 1 ring columns, N = S + W columns, K key width,
V value width, P = scores padded, A vocabulary. `prepare` precomputes everything that does not depend on the token.

A row's result is batch-invariant: bit-identical for any neighbours, slot index and number of slots. Each row of memory has its own
product, and products with weights use `batch_invariant`. Tests enforce this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from linnet.core import quant
from linnet.core.pytree import replace
from linnet.core.quant import Weight, concat_outputs, to_array
from linnet.models.decoding import decode_program, tick_program
from linnet.models.tensor_parallel import ONE_DEVICE, TensorParallel, weight_pspecs
from linnet.models.vq.config import VQConfig
from linnet.models.vq.decode_state import (
    Prepared,
    UnitMemory,
    UnitWeights,
    VQSlots,
    prepared_pspecs,
    shard_config,
    shard_model,
    split_fused_kvg,
)
from linnet.models.vq.model import add_condition, distance_vectors, key_scale
from linnet.models.vq.params import RULES, VQBuffers, VQParams, buffer_specs
from linnet.nn import codebook
from linnet.nn.batch_invariant import LANES, matmul, split_k
from linnet.nn.moe import Mixture
from linnet.nn.norm import rms_norm, rms_norm_affine, rms_norm_gain
from linnet.nn.positions import sinusoid
from linnet.nn.tiled import moe_decode
from linnet.parallel import sharding
from linnet.parallel.sharding import shard_map


@partial(jax.jit, static_argnames="cfg")
def prepare(params: VQParams, buffers: VQBuffers, cfg: VQConfig) -> Prepared:
    if sharding.current() is None:
        return _prepare(params, buffers, cfg)
    (split, specs), shard_cfg = split_fused_kvg(params, cfg), shard_config(cfg)

    def here(params: VQParams, buffers: VQBuffers) -> Prepared:
        columns: Any = params.units.w_kvg  # of keys, values and gates
        units = replace(params.units, w_kvg=concat_outputs(*columns))
        return _prepare(replace(params, units=units), buffers, shard_cfg)

    ins = (weight_pspecs(specs, split, RULES), weight_pspecs(buffer_specs(cfg), buffers, RULES))
    return shard_map(here, (split, buffers), ins, prepared_pspecs(cfg))


def _prepare(params: VQParams, buffers: VQBuffers, cfg: VQConfig) -> Prepared:
    vectors = codebook.code_vectors(buffers.code_count, buffers.code_total)
    dtype = jnp.dtype(cfg.dtype)

    def unit(g: int) -> UnitWeights:
        p = jax.tree.map(lambda x: x[g], params.units)
        u, w = (x.reshape(cfg.n_head, 1, cfg.d_k) * key_scale(cfg) for x in (p.u, p.w))
        distances = distance_vectors(p, cfg).astype(jnp.float32)
        scores = jnp.concatenate([vectors[g], distances], axis=1)  # H S+R K
        offset = jnp.concatenate([jnp.sum(u * vectors[g], -1), jnp.sum(w * distances, -1)], axis=1)
        return UnitWeights(
            gain=p.norm_gain,
            bias=p.norm_bias,
            project=split_k(_narrow(concat_outputs(p.w_q, p.w_kvg), dtype)),
            scores=tuple(split_k(head.T) for head in scores),
            offset=jnp.pad(offset, [(0, 0), (0, -offset.shape[1] % LANES)]),
            half_square=0.5 * jnp.sum(vectors[g] ** 2, axis=-1),
            out=split_k(_narrow(p.w_res, dtype)),
            mixture=quant.bfloat16_as_bits(jax.tree.map(lambda x: x[g], params.mixture)),
        )

    return Prepared(
        embed=params.embed,
        position_scale=params.position_scale,
        units=tuple(unit(g) for g in range(cfg.n_unit)),
        out_gain=params.out_gain,
        out_norm_bias=params.out_norm_bias,
        logits=split_k(params.embed.T if params.w_out is None else params.w_out),
        logits_bias=params.out_bias,
        position_gain=params.place,
    )


def _narrow(matrix: Weight, dtype: Any) -> Weight:
    """Cast a float matrix to the dtype of the activations, unless it is narrower or quantised."""
    if not isinstance(matrix, jax.Array) or matrix.dtype.itemsize < dtype.itemsize:
        return matrix
    return matrix.astype(dtype)


def code_vectors(weights: UnitWeights, cfg: VQConfig) -> Float[Array, "H S K"]:
    return jnp.stack(
        [jnp.concatenate([to_array(part, jnp.float32) for part in head])[:, : cfg.n_code].T for head in weights.scores]
    )


def table_size(cfg: VQConfig) -> int:
    return cfg.n_code if cfg.agg_cache else 0


def read_token(
    prepared: Prepared,
    slots: VQSlots,
    tokens: Int[Array, " B"],
    active: Bool[Array, " B"] | None,
    cfg: VQConfig,
    tp: TensorParallel = ONE_DEVICE,
) -> tuple[VQSlots, Float[Array, "B A"]]:
    """One tick, to be traced into a larger program. `cfg` is the config of one device's shard of the model. All slots tick, active or
    not."""
    del active
    dtype = jnp.dtype(cfg.dtype)
    x = tp.embedding_lookup(prepared.embed, tokens, cfg.n_vocab).astype(dtype)
    if cfg.d_condition:
        assert prepared.position_gain is not None
        assert slots.condition is not None
        x = x + add_condition(prepared.position_gain, slots.condition, slots.position, cfg).astype(dtype)
    if prepared.position_scale is not None:
        wave = sinusoid(slots.position, cfg.d_model, cfg.pe_lam)
        x = x + (prepared.position_scale * wave).astype(dtype)
    ring = cfg.mem_len + 1
    column = jnp.repeat(slots.position % ring, cfg.n_head)
    distance = (column[:, None] - jnp.arange(ring)) % ring
    begins = jnp.repeat(tokens == cfg.end_id, cfg.n_head) if cfg.reset_at_documents else None
    units = []
    for weights, memory in zip(prepared.units, slots.units, strict=True):
        y, memory = _unit(x, weights, memory, column, distance, begins, cfg)
        x = x + tp.psum(y, "model")
        if weights.mixture is not None:
            x = x + _mixture(x, weights.mixture, cfg, tp)
        units.append(memory)
    x = x.astype(jnp.float32)
    if prepared.out_gain is not None and prepared.out_norm_bias is not None:
        x = rms_norm_affine(x, prepared.out_gain, prepared.out_norm_bias)
    logits = matmul(x, prepared.logits)[:, : prepared.logits_bias.shape[0]] + prepared.logits_bias
    logits = tp.all_gather_logits(cfg.e_scale * logits, cfg.n_vocab)
    return replace(slots, units=tuple(units), position=slots.position + 1), logits


def _unit(
    x: Float[Array, "B D"],
    weights: UnitWeights,
    memory: UnitMemory,
    column: Int[Array, " R"],
    distance: Int[Array, "R W"],
    begins: Array | None,
    cfg: VQConfig,
) -> tuple[Float[Array, "B D"], UnitMemory]:
    batch, n_head, rows = x.shape[0], cfg.n_head, column.shape[0]
    hk, hv, n_code = n_head * cfg.d_k, n_head * cfg.d_v, cfg.n_code
    h = rms_norm_affine(x, weights.gain, weights.bias)
    projected = matmul(h, weights.project)[:, : 2 * (hk + hv)]
    qk = rms_norm(projected[:, : 2 * hk].reshape(batch, 2, n_head, cfg.d_k)) * key_scale(cfg)
    qk = qk.astype(jnp.float32)
    value = jax.nn.silu(projected[:, 2 * hk : 2 * hk + hv]).reshape(rows, cfg.d_v).astype(jnp.float32)
    gate = jax.nn.silu(projected[:, 2 * hk + hv :])
    # q and k separately: with one row each this is a matrix-vector product, which is fastest.
    by_query = jnp.stack([matmul(qk[:, 0, i], head) for i, head in enumerate(weights.scores)], axis=1) + weights.offset
    by_key = jnp.stack([matmul(qk[:, 1, i], head) for i, head in enumerate(weights.scores)], axis=1)
    by_query = by_query.reshape(rows, -1)
    code = jnp.argmax(by_key[..., :n_code] - weights.half_square, axis=-1).reshape(rows).astype(jnp.int32)

    if begins is not None:
        memory = replace(memory, count=jnp.where(begins[:, None], 0.0, memory.count))
    memory = _write(memory, column, code, value)

    n_table = table_size(cfg)
    near = jnp.take_along_axis(by_query, memory.codes, axis=1)
    near = near + jnp.take_along_axis(by_query, n_code + distance, axis=1)
    score = jnp.concatenate([by_query[:, :n_table], near], axis=1)
    score = jnp.where(memory.count > 0, score, -jnp.inf)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    norm = jnp.sum(weight * memory.count, axis=-1, keepdims=True)
    mixed = jnp.einsum("rn,rnv->rv", weight, memory.total) / norm
    mixed = mixed.astype(x.dtype).reshape(batch, hv)
    return matmul(mixed * gate, weights.out)[:, : cfg.d_model], memory


def _mixture(x: Float[Array, "B D"], mixture: Mixture, cfg: VQConfig, tp: TensorParallel) -> Float[Array, "B D"]:
    wanted = jnp.ones((x.shape[0],), bool)
    h = rms_norm_gain(x, mixture.in_gain)
    first = tp.first_expert(cfg.n_expert)
    y = moe_decode(h, mixture.router[None], mixture.experts, 0, wanted, cfg.n_choice, first)
    return rms_norm_gain(tp.psum(y, "model", "expert"), mixture.out_gain)


def _write(
    memory: UnitMemory, column: Int[Array, " R"], code: Int[Array, " R"], value: Float[Array, "R V"]
) -> UnitMemory:
    """Move the key in the ring column that is reused to the table and write the new key. One scatter does both: XLA runs it in
    place, whereas two consecutive updates are each fused with the matmul that reads them, and copy everything."""
    n_row, ring = memory.codes.shape
    n_table = memory.count.shape[1] - ring
    here = n_table + column
    rows = jnp.arange(n_row)
    if n_table:
        memory, (old_code, old_total) = evict_from_ring(memory, column, write=False)
        written = jnp.stack([old_code, here], axis=1)
        new = jnp.stack([old_total, value], axis=1)
    else:
        written, new = here[:, None], value[:, None]
    total = memory.total.at[rows[:, None], written].set(new, unique_indices=True, mode="promise_in_bounds")
    return UnitMemory(
        total=jax.lax.optimization_barrier(total),
        codes=jnp.where(jnp.arange(ring) == column[:, None], code[:, None], memory.codes),
        count=jnp.where(jnp.arange(n_table + ring) == here[:, None], 1.0, memory.count),
    )


def evict_from_ring(
    memory: UnitMemory, column: Int[Array, " R"], *, write: bool = True
) -> tuple[UnitMemory, tuple[Int[Array, " R"], Float[Array, "R V"]]]:
    """Move each row's key in ring column `column` (if there is one) to the table: the counts, and with `write` the totals. Also
    returns the changed table columns and their new totals."""
    n_row, ring = memory.codes.shape
    n_table = memory.count.shape[1] - ring
    rows = jnp.arange(n_row)
    code = memory.codes[rows, column]
    if not n_table:
        return memory, (code, memory.total[rows, code])
    moving = memory.count[rows, n_table + column][:, None]
    old = jnp.where(memory.count[rows, code][:, None] > 0, memory.total[rows, code], 0.0)
    total = old + jnp.where(moving > 0, memory.total[rows, n_table + column], 0.0)
    columns = jnp.arange(memory.count.shape[1])
    count = memory.count + jnp.where(columns == code[:, None], moving, 0.0)
    count = jnp.where(columns == n_table + column[:, None], 0.0, count)
    memory = replace(memory, count=count)
    if write:
        memory = replace(memory, total=memory.total.at[rows, code].set(total))
    return memory, (code, total)


tick = tick_program(read_token, shard_model)
decode = decode_program(read_token, shard_model)
