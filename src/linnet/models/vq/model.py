"""The `vq` model: embedding, scanned gated attention units, logits, and the training loss.

Letters: B batch, T tokens, D model width, G units, H heads, K key width, V value width per head, S codes, A vocabulary,
E width of a condition.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from linnet.core import rng
from linnet.core.pytree import pytree, replace
from linnet.core.quant import Weight, concat_outputs
from linnet.models.model_config import ffn_size
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import RULES, UnitParams, VQBuffers, VQParams, head_axis
from linnet.nn import codebook, losses, vq_attention_scan
from linnet.nn import moe as experts
from linnet.nn.linear import linear
from linnet.nn.norm import rms_norm, rms_norm_affine, rms_norm_gain
from linnet.nn.positions import sinusoid
from linnet.nn.vq_attention import AttentionState, Queries, attention, empty_state, into_blocks, out_of_blocks
from linnet.nn.vq_attention_reference import attention_dense
from linnet.parallel import sharding
from linnet.parallel.sharding import AxesTree

PROJECTED = "projected"


@pytree
class VQCarry:
    """Recurrent state of a sequence, of constant size for any length."""

    attention: AttentionState  # stacked over units
    position: Int[Array, " B"]  # tokens read so far
    condition: Float[Array, "B D"] | None = None  # projected condition (zeros: none); None in an unconditional model


@pytree
class Dropout:
    """Random keys of one update: `update` is new for every update, `sequence` is constant within a sequence. There is one key per
    row, so that a row's dropout does not depend on its batch."""

    update: Key[Array, " B"]
    sequence: Key[Array, " B"]
    shared: PRNGKeyArray  # for the sinusoids, the same for all rows


@pytree
class UnitAux:
    """Auxiliary outputs of a unit, stacked over units."""

    seen: codebook.CodeStatistics
    candidates: Float[Array, "*G H S K"] | None  # keys onto which dead codes can be moved
    commitment: Float[Array, "*G"]
    key_norm: Float[Array, "*G"]
    quantised_norm: Float[Array, "*G"]
    error: Float[Array, "*G 3"]  # relative quantisation error: minimum, mean, maximum
    codes: Int[Array, "*G B H T"]
    output: Float[Array, "*G B T D"] | None  # None unless requested
    router: experts.RouterStats | None = None  # None without experts


STATE_AXES = AxesTree.of(
    AttentionState,
    codes=("batch", "heads", None),
    keys=("batch", "heads", None, None),
    values=("batch", "heads", None, "values"),
    documents=("batch", None),
    count=("batch", "heads", None),
    total=("batch", "heads", None, "values"),
    table_document=("batch",),
)
"""Logical axes of one unit's state."""


def carry_axes(carry: VQCarry) -> AxesTree[VQCarry]:
    """Return the logical axes of a carry."""
    attention = sharding.map_axes(lambda axes: ("layers", *axes), STATE_AXES)
    condition = None if carry.condition is None else ("batch", None)
    return AxesTree.of(VQCarry, attention=attention, position=("batch",), condition=condition)


def empty_carry(cfg: VQConfig, batch: int) -> VQCarry:
    return VQCarry(
        attention=empty_state(
            batch, cfg.n_head, cfg.mem_len, cfg.n_code, cfg.d_k, cfg.d_v, jnp.dtype(cfg.dtype), leading=(cfg.n_unit,)
        ),
        position=jnp.zeros((batch,), jnp.int32),
        condition=jnp.zeros((batch, cfg.d_model), jnp.float32) if cfg.d_condition else None,
    )


def conditioned(params: VQParams, carry: VQCarry, embeds: Float[Array, "B E"], cfg: VQConfig) -> VQCarry:
    """Attach a unit-norm conditioning embedding to each sequence; a zero row means unconditional.

    The state stores the projected condition, and every position adds it with its own gain. A prefix read only through attention
    would be one old key among many: beyond the window it counts only through its code."""
    assert params.w_condition is not None
    # Unit variance, like token embeddings.
    wide = math.sqrt(cfg.d_condition) * embeds.astype(jnp.float32)
    return replace(carry, condition=jnp.matmul(wide, params.w_condition, precision="highest"))


def add_condition(
    position_gain: Float[Array, "P D"], condition: Float[Array, "*#B D"], position: Int[Array, "*B"], cfg: VQConfig
) -> Float[Array, "*B D"]:
    """Return the condition scaled by the gain of a position, which is added to the input there."""
    return condition * position_gain[jnp.minimum(position, cfg.n_place - 1)]


def forward(
    params: VQParams,
    buffers: VQBuffers,
    tokens: Int[Array, "B T"],
    carry: VQCarry,
    cfg: VQConfig,
    *,
    documents: Int[Array, "B T"] | None = None,
    mask: Float[Array, "B T"] | None = None,
    length: Int[Array, " B"] | None = None,
    dropout: Dropout | None = None,
    block_len: int | None = None,
    dense: bool = False,
    keep_outputs: bool = False,
) -> tuple[Float[Array, "B T D"], VQCarry, UnitAux]:
    """Return the final hidden vectors of T tokens after `carry`, and the carry after them (after `length` of them, if given)."""
    dtype = jnp.dtype(cfg.dtype)
    n_token = tokens.shape[1]
    block_len = n_token if dense else block_len or cfg.block_len
    documents = jnp.zeros_like(tokens) if documents is None else documents
    if length is not None:
        documents = jnp.where(jnp.arange(n_token) < length[:, None], documents, vq_attention_scan.EMPTY)
    documents = into_blocks(documents, block_len, vq_attention_scan.EMPTY)
    mask = jnp.ones(tokens.shape, jnp.float32) if mask is None else mask
    x = params.embed[into_blocks(tokens, block_len)].astype(dtype)
    position = into_blocks(carry.position[:, None] + jnp.arange(n_token), block_len)
    if cfg.d_condition:
        assert params.place is not None
        assert carry.condition is not None
        x = x + add_condition(params.place, carry.condition[:, None], position, cfg).astype(dtype)
    if params.position_scale is not None:
        x = x + (params.position_scale * sinusoid(position, cfg.d_model, cfg.pe_lam)).astype(dtype)
    if dropout is not None and cfg.p_dropemb:
        x = _drop_rows(x, cfg.p_dropemb, _row_stream(dropout.update, "embedding"))
    codes = codebook.code_vectors(buffers.code_count, buffers.code_total)
    in_blocks = into_blocks(mask, block_len)

    def unit(x: Array, inputs: tuple[Any, ...]) -> tuple[Array, tuple[AttentionState, UnitAux]]:
        p, unit_codes, state, index, mixture = inputs
        drop = None if dropout is None else jax.tree.map(lambda k: _fold_rows(k, index), dropout)
        y, state, aux = _unit(x, p, unit_codes, state, cfg, documents, mask, length, drop, dense, keep_outputs)
        if drop is not None and cfg.p_droplyr:
            y = _drop_rows(y, cfg.p_droplyr, _row_stream(drop.sequence, "layer"), per_row=True)
        x = x + y
        if mixture is not None:
            z, routing = experts.moe_block(x, mixture, cfg.n_choice, (None, "batch", None, None), RULES)
            x = x + rms_norm_gain(z, mixture.out_gain)
            aux = replace(aux, router=experts.router_stats(routing, in_blocks.reshape(-1)))
        return x, (state, aux)

    # Norms, SiLU and similar operations are cheaper to recompute than to store.
    attended = vq_attention_scan.KEPT
    keep = {"none": (PROJECTED, *attended), "some": attended, "full": ()}[cfg.remat]
    unit = jax.checkpoint(unit, policy=jax.checkpoint_policies.save_only_these_names(*keep), prevent_cse=False)
    inputs = (params.units, codes, carry.attention, jnp.arange(cfg.n_unit), params.mixture)
    x, (attention_after, aux) = jax.lax.scan(unit, x, inputs)
    x = out_of_blocks(x, n_token)
    read = n_token if length is None else length.astype(jnp.int32)
    return x, replace(carry, attention=attention_after, position=carry.position + read), aux


def logits(params: VQParams, x: Float[Array, "*B D"], cfg: VQConfig) -> Float[Array, "*B A"]:
    if params.out_gain is not None and params.out_norm_bias is not None:
        x = rms_norm_affine(x, params.out_gain, params.out_norm_bias)
    weights = params.embed.T if params.w_out is None else params.w_out
    return cfg.e_scale * (linear(x.astype(jnp.float32), weights) + params.out_bias)


def unit_projections(
    x: Float[Array, "*B T D"], p: UnitParams, cfg: VQConfig
) -> tuple[Float[Array, "*B H T K"], Float[Array, "*B H T K"], Float[Array, "*B H T V"], Float[Array, "*B T HV"]]:
    """Return normalised queries (without u and w), keys, values and gates."""
    hk, hv = cfg.n_head * cfg.d_k, cfg.n_head * cfg.d_v
    scale = key_scale(cfg)
    h = rms_norm_affine(x, p.norm_gain, p.norm_bias)
    ends = [hk, 2 * hk, 2 * hk + hv]
    if sharding.axis_size("model") == 1:
        joined = checkpoint_name(linear(h, concat_outputs(p.w_q, p.w_kvg)), PROJECTED)
        q, k, v, g = jnp.split(joined, ends, axis=-1)
    else:  # sharded separately: a shard of the fused product would mix keys and values
        axes = (head_axis(cfg), head_axis(cfg), "values", "values")
        pairs = zip(_columns(concat_outputs(p.w_q, p.w_kvg), ends), axes, strict=True)
        matrices = (jax.tree.map(lambda w, a=a: sharding.constrain(w, (None, a), RULES), matrix) for matrix, a in pairs)
        q, k, v, g = (checkpoint_name(linear(h, w), PROJECTED) for w in matrices)
    q = rms_norm(heads(q, cfg.n_head)) * scale
    return q, rms_norm(heads(k, cfg.n_head)) * scale, heads(jax.nn.silu(v), cfg.n_head), jax.nn.silu(g)


def _columns(matrix: Weight, ends: list[int]) -> list[Weight]:
    """Split a matrix by outputs."""
    edges = zip([0, *ends], [*ends, None], strict=True)
    return [jax.tree.map(lambda w, a=a, b=b: w[..., a:b], matrix) for a, b in edges]


def key_scale(cfg: VQConfig) -> float:
    """Return tau ** -1/2 with tau = sqrt(K); applied to queries and keys, it divides their product by tau."""
    return cfg.d_k**-0.25


def heads(x: Float[Array, "*B T HE"], n_head: int) -> Float[Array, "*B H T E"]:
    return x.reshape(*x.shape[:-1], n_head, -1).swapaxes(-2, -3)


def distance_vectors(p: UnitParams, cfg: VQConfig, dropout_key: PRNGKeyArray | None = None) -> Float[Array, "H R K"]:
    """Return the relative position vectors r_0 .. r_M of one unit."""
    waves = sinusoid(jnp.arange(cfg.mem_len + 1), cfg.d_model, cfg.pe_lam)
    if dropout_key is not None and cfg.p_dropsin:
        waves = _drop(waves, cfg.p_dropsin, dropout_key)
    r = waves.astype(cfg.dtype) @ p.w_r.astype(cfg.dtype) * key_scale(cfg)
    return r.reshape(-1, cfg.n_head, cfg.d_k).swapaxes(0, 1)


def query_pair(q: Float[Array, "*B H T K"], p: UnitParams, cfg: VQConfig) -> Queries:
    u, w = (x.reshape(cfg.n_head, 1, cfg.d_k).astype(q.dtype) * key_scale(cfg) for x in (p.u, p.w))
    return Queries(content=q + u, position=q + w)


def _unit(
    x: Float[Array, "N B L D"],
    p: UnitParams,
    codes: Float[Array, "H S K"],
    state: AttentionState,
    cfg: VQConfig,
    documents: Int[Array, "N B L"],
    mask: Float[Array, "B T"],
    length: Int[Array, " B"] | None,
    dropout: Dropout | None,
    dense: bool,
    keep_outputs: bool,
) -> tuple[Float[Array, "N B L D"], AttentionState, UnitAux]:
    q, k, v, gate = unit_projections(x, p, cfg)
    chosen = checkpoint_name(codebook.nearest(jax.lax.stop_gradient(k), codes), PROJECTED)
    quantised = codebook.lookup(codes, chosen)
    keys = codebook.straight_through(k, quantised.astype(k.dtype))
    r = distance_vectors(p, cfg, None if dropout is None else rng.fold_in_name(dropout.shared, "sinusoid"))
    options = {
        "agg_cache": cfg.agg_cache,
        "grad_thru_cache": cfg.grad_thru_cache,
        "reset": cfg.reset_at_documents,
    }
    queries = query_pair(q, p, cfg)
    n_token = mask.shape[1]
    if dense:  # one block
        queries = jax.tree.map(lambda a: a[0], queries)
        mixed = attention_dense(queries, keys[0], v[0], r, documents[0], block_len=cfg.block_len, **options)[None]
    else:
        mixed, state = _attention(queries, keys, chosen, v, codes, r, state, documents, length, n_token, options)
    mixed = mixed.swapaxes(-2, -3).reshape(gate.shape)
    y = linear(mixed * gate, p.w_res)
    if dropout is not None and cfg.p_dropres:
        y = _drop_rows(y, cfg.p_dropres, _row_stream(dropout.update, "residual"))
    k, quantised = out_of_blocks(k, n_token), out_of_blocks(quantised, n_token)
    chosen = out_of_blocks(chosen[..., None], n_token)[..., 0]
    candidates = None
    if cfg.restart_dead_codes and dropout is not None:
        candidates = codebook.draw_keys(k, mask, cfg.n_code, rng.fold_in_name(dropout.shared, "restart"))
    return (
        y,
        state,
        _unit_aux(k, quantised, chosen, mask, cfg, candidates, out_of_blocks(y, n_token) if keep_outputs else None),
    )


def _attention(
    queries: Queries,
    keys: Float[Array, "N B H L K"],
    chosen: Int[Array, "N B H L"],
    values: Float[Array, "N B H L V"],
    codes: Float[Array, "H S K"],
    distances: Float[Array, "H R K"],
    state: AttentionState,
    documents: Int[Array, "N B L"],
    length: Int[Array, " B"] | None,
    n_token: int,
    options: dict[str, bool],
) -> tuple[Float[Array, "N B H L V"], AttentionState]:
    """Attend in `shard_map`: rows and heads (with a single head, slices of its values) are independent, so no collective is needed."""
    by_key, by_value = (None, "batch", "heads", None, None), (None, "batch", "heads", None, "values")
    axes = (
        AxesTree.of(Queries, content=by_key, position=by_key),
        by_key,
        by_key[:-1],
        by_value,
        ("heads", None, None),
        ("heads", None, None),
        STATE_AXES,
        (None, "batch", None),
        None if length is None else ("batch",),
    )

    def attend(queries: Queries, *rest: Any) -> tuple[Array, AttentionState]:
        *others, length = rest
        return attention(queries, *others, n_token=n_token, length=length, **options)

    args = (queries, keys, chosen, values, codes, distances, state, documents, length)
    return sharding.shard_map_by_axes(attend, RULES, args, axes, (by_value, STATE_AXES), (values, state))


def _unit_aux(
    k: Float[Array, "B H T K"],
    quantised: Float[Array, "B H T K"],
    chosen: Int[Array, "B H T"],
    mask: Float[Array, "B T"],
    cfg: VQConfig,
    candidates: Array | None,
    output: Array | None,
) -> UnitAux:
    wide = k.astype(jnp.float32)
    square_error = jnp.sum((wide - quantised) ** 2, axis=-1)  # B H T
    key_norm = jnp.linalg.norm(jax.lax.stop_gradient(wide), axis=-1)
    relative = jax.lax.stop_gradient(jnp.sqrt(square_error)) / key_norm
    return UnitAux(
        seen=codebook.statistics(jax.lax.stop_gradient(k), chosen, mask, cfg.n_code),
        candidates=candidates,
        commitment=jnp.mean(mask * jnp.sum(square_error, axis=1)),
        key_norm=jnp.mean(key_norm),
        quantised_norm=jnp.mean(jnp.linalg.norm(quantised, axis=-1)),
        error=_spread_by_block(relative, cfg.block_len),
        codes=chosen,
        output=output,
    )


def _spread_by_block(x: Float[Array, "B H T"], block_len: int) -> Float[Array, " 3"]:
    """Return the minimum and maximum of each block, averaged over blocks (as the reference logs them), and the mean."""
    short = -x.shape[-1] % block_len
    blocks = jnp.pad(x, ((0, 0), (0, 0), (0, short)), mode="edge").reshape(*x.shape[:2], -1, block_len)
    return jnp.stack([jnp.mean(jnp.min(blocks, axis=-1)), jnp.mean(x), jnp.mean(jnp.max(blocks, axis=-1))])


def _drop(x: Array, p: float, key: PRNGKeyArray, shape: tuple[int, ...] | None = None) -> Array:
    keep = jax.random.bernoulli(key, 1.0 - p, x.shape if shape is None else shape)
    return jnp.where(keep, x / (1.0 - p), jnp.zeros((), x.dtype)).astype(x.dtype)


def _drop_rows(
    x: Float[Array, "N B L D"], p: float, keys: Key[Array, " B"], per_row: bool = False
) -> Float[Array, "N B L D"]:
    """Apply dropout with one key per row; `per_row` keeps or drops complete rows."""
    return jax.vmap(lambda row, key: _drop(row, p, key, (1,) * row.ndim if per_row else None), (1, 0), 1)(x, keys)


def _row_stream(keys: Key[Array, " B"], name: str) -> Key[Array, " B"]:
    return jax.vmap(lambda key: rng.fold_in_name(key, name))(keys)


def _fold_rows(keys: Key[Array, "*B"], index: Int[Array, ""]) -> Key[Array, "*B"]:
    fold = jax.random.fold_in
    return jax.vmap(lambda key: fold(key, index))(keys) if keys.ndim else fold(keys, index)


def nats(params: VQParams, x: Float[Array, "B T D"], targets: Int[Array, "B T"], cfg: VQConfig) -> Float[Array, "B T"]:
    """Return -log p(target) in float32."""
    return losses.token_nll(logits(params, x, cfg), targets)


def n_flops_per_token(cfg: VQConfig, block_len: int | None = None) -> int:
    """Return twice the multiply-adds of this forward pass: the count that MFU is computed from."""
    block = block_len or cfg.block_len
    columns = math.ceil(cfg.mem_len / block) * block + block
    hk, hv, s = cfg.n_head * cfg.d_k, cfg.n_head * cfg.d_v, cfg.n_code
    project = cfg.d_model * (2 * hk + 2 * hv) + hv * cfg.d_model
    quantise = hk * s
    near = columns * (hk + hv) + (cfg.mem_len + 1) * hk
    far = s * (hk + hv) if cfg.agg_cache else 0
    mixture = (
        cfg.d_model * (cfg.n_expert + 3 * cfg.n_choice * ffn_size(cfg.d_model, cfg.widening)) if cfg.n_expert else 0
    )
    return 2 * (cfg.n_unit * (project + quantise + near + far + mixture) + cfg.d_model * cfg.n_vocab)
