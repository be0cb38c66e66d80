"""Transformer components: positions, attention to cached and new tokens, feed-forward.

Letters: B rows, N new tokens, S = preceding positions (the null key, then tokens read earlier), D width, H heads, K width of a
head, F hidden width, R rotated values. A weight is a matrix, or a `SplitK` tuple of `batch_invariant` where rows must be independent.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import N_BUCKET, LayerParams
from linnet.nn.linear import linear
from linnet.nn.norm import l2_normalize, layer_norm
from linnet.nn.positions import apply_interleaved_rope, interleaved_rope_tables

COSINE_SCALE = 16.0
MAX_DISTANCE = 128
NEG_INF = -1e30


@dataclasses.dataclass(frozen=True)
class RowPositions:
    """Positions that differ between rows."""

    of_query: Int[Array, "B N"]
    of_key: Int[Array, "B S"]
    """Token positions plus one, because the null key has position 0."""
    n: int
    """Upper bound (exclusive) of all positions."""


def apply_partial_rope(x: Float[Array, "B *H N K"], first: int | RowPositions, width: int) -> Float[Array, "B *H N K"]:
    """Apply rotary embeddings to adjacent pairs of the first `width` values; the others are unchanged. Positions count up from
    `first`, or are given for every row."""
    if not width:
        return x
    if isinstance(first, int):
        cos, sin = interleaved_rope_tables(first, x.shape[-2], width)
    else:
        cos, sin = (jnp.asarray(table)[first.of_query] for table in interleaved_rope_tables(0, first.n, width))
        if x.ndim == 4:
            cos, sin = cos[:, None], sin[:, None]
    return apply_interleaved_rope(x, cos, sin)


def bucket(distance: Int[np.ndarray, "*N"]) -> Int[np.ndarray, "*N"]:
    """Return the bucket of a distance: one per near distance, logarithmic for far ones."""
    near = N_BUCKET // 2
    distance = np.maximum(distance, 0)
    with np.errstate(divide="ignore"):
        # In float32 like the reference, because rounding decides the bucket.
        fraction = np.log(distance.astype(np.float32) / np.float32(near)) / np.float32(math.log(MAX_DISTANCE / near))
        far = near + np.maximum(fraction * np.float32(N_BUCKET - near), 0).astype(np.int64)
    return np.where(distance < near, distance, np.minimum(far, N_BUCKET - 1))


def position_bias(table: Float[Array, "32 H"], first: int, n: int) -> Float[Array, "H N S"]:
    """Return the bias of `n` tokens from `first` on towards the null key and all tokens up to the last. The null key has position 0,
    so a token's own key and the one before it are both at distance 0, as in the reference."""
    query, key = np.arange(first, first + n)[:, None], np.arange(first + n + 1)
    return jnp.moveaxis(table[bucket(query - key)], -1, 0)


def row_bias(table: Float[Array, "32 H"], positions: RowPositions) -> Float[Array, "B H N S"]:
    """Variant of `position_bias` for positions that differ between rows."""
    distance = jnp.maximum(positions.of_query[:, :, None] - positions.of_key[:, None], 0)
    return jnp.moveaxis(table[jnp.asarray(bucket(np.arange(positions.n)))[distance]], -1, 1)


def visible(first: int, n: int) -> Bool[np.ndarray, "N S"]:
    return np.arange(first + n + 1) <= np.arange(first, first + n)[:, None] + 1


def scaled_key(k: Float[Array, "*B K"], cfg: PriorConfig) -> Float[Array, "*B K"]:
    """Scale keys for cosine scores. Keys are cached in this form."""
    if cfg.scores != "cosine":
        return k
    return (l2_normalize(k.astype(jnp.float32)) * math.sqrt(COSINE_SCALE)).astype(k.dtype)


def keys_values(
    x: Float[Array, "B N D"], p: LayerParams, first: int | RowPositions, cfg: PriorConfig
) -> tuple[Float[Array, "B N K"], Float[Array, "B N K"]]:
    """Return keys and values of normalised tokens at positions from `first` on."""
    k, v = jnp.split(linear(x, p.w_kv, transpose_inputs=True)[..., : 2 * cfg.d_head], 2, axis=-1)
    return scaled_key(apply_partial_rope(k, first, cfg.n_rotated), cfg), v


def attend(
    x: Float[Array, "B N D"],
    p: LayerParams,
    keys: Float[Array, "B S K"],
    values: Float[Array, "B S K"],
    bias: Float[Array, "*R H N S"],
    seen: Bool[Array, "*R2 N S"],
    first: int | RowPositions,
    cfg: PriorConfig,
    dropout: Key[Array, " B"] | None = None,
) -> Float[Array, "B N D"]:
    """Attend from normalised tokens to all keys that are `seen`. All heads share the keys (multi-query attention)."""
    n_row, n_token, _ = x.shape
    q = linear(x, p.w_q, transpose_inputs=True)[..., : cfg.n_head * cfg.d_head]
    q = q.reshape(n_row, n_token, cfg.n_head, cfg.d_head).transpose(0, 2, 1, 3)  # B H N K
    q = apply_partial_rope(q, first, cfg.n_rotated)
    q = scaled_key(q, cfg) if cfg.scores == "cosine" else q * cfg.d_head**-0.5
    flat = q.reshape(n_row, -1, cfg.d_head)
    score = jnp.einsum("bqk,bsk->bqs", flat, keys, preferred_element_type=jnp.float32)
    score = score.reshape(n_row, cfg.n_head, n_token, -1) + bias
    score = jnp.where(jnp.expand_dims(seen, -3), score, NEG_INF)
    weight = drop(jax.nn.softmax(score, axis=-1), dropout, cfg.p_drop_attention).astype(values.dtype)
    mixed = jnp.einsum("bqs,bsk->bqk", weight.reshape(n_row, -1, keys.shape[1]), values)
    mixed = mixed.reshape(n_row, cfg.n_head, n_token, -1).transpose(0, 2, 1, 3).reshape(n_row, n_token, -1)
    return layer_norm(linear(mixed, p.w_out, transpose_inputs=True)[..., : cfg.dim], p.out_gain, cfg.norms)


def feed_forward(
    x: Float[Array, "B N D"], p: LayerParams, cfg: PriorConfig, dropout: Key[Array, " B"] | None = None
) -> Float[Array, "B N D"]:
    hidden = cfg.dim * cfg.ff_mult
    both = linear(layer_norm(x, p.ff_gain, cfg.norms), p.w_in, transpose_inputs=True)
    value, gate = jnp.split(both[..., : 2 * hidden], 2, axis=-1)
    y = value * jax.nn.silu(gate)
    if p.mid_gain is not None:
        y = layer_norm(y, p.mid_gain, cfg.norms)
    return linear(drop(y, dropout, cfg.p_drop_ff), p.w_back, transpose_inputs=True)[..., : cfg.dim]


def drop(x: Array, keys: Key[Array, " B"] | None, chance: float) -> Array:
    """Apply dropout with one key per row, so that the result does not depend on how the batch is split."""
    if keys is None or chance == 0.0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - chance, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - chance), 0).astype(x.dtype)
