"""Transformer components: norms, positions, attention to cached and new tokens, feed-forward.

Letters: B rows, N new tokens, S = preceding positions (the null key, then tokens read earlier), D width, H heads, K width of a
head, F hidden width, R rotated values. A weight is a matrix, or a `SplitK` tuple of `batch_invariant` where rows must be independent.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from linnet.models.prior.config import Norm, PriorConfig
from linnet.models.prior.params import N_BUCKET, LayerParams
from linnet.models.prior.product import product
from linnet.nn import batch_invariant

EPSILON = 1e-5
COSINE_SCALE = 16.0
MAX_DISTANCE = 128
ROTARY_BASE = 10_000.0
SMALLEST_LENGTH = 1e-12
HIDDEN = -1e30


@dataclasses.dataclass(frozen=True)
class Places:
    """Positions that differ between rows."""

    of_query: Int[Array, "B N"]
    of_key: Int[Array, "B S"]
    """Token positions plus one, because the null key has position 0."""
    n: int
    """Upper bound (exclusive) of all positions."""


def layer_norm(x: Float[Array, "*B D"], gain: Float[Array, " D"], kind: Norm = "plain") -> Float[Array, "*B D"]:
    """Layer norm in float32. `maximum` first divides by the row's largest value, without a gradient. This is not the largest
    magnitude: as in the reference, a row of negative values changes its sign, and a row of zeros becomes NaN."""
    wide = x.astype(jnp.float32)
    if kind == "maximum":
        wide = wide / jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + EPSILON) * gain).astype(x.dtype)


def unit(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Normalize to norm 1. A zero vector stays zero and has a zero gradient."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    tiny = square < SMALLEST_LENGTH**2
    length = jnp.sqrt(jnp.where(tiny, 1.0, square))
    return x / jnp.where(tiny, SMALLEST_LENGTH, length)


def times(x: Float[Array, "*B D"], weight: Any) -> Float[Array, "*B E"]:
    if not isinstance(weight, tuple):
        return product(x, weight)
    return batch_invariant.matmul(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)


def rotary_frequencies(width: int) -> Float[np.ndarray, " R"]:
    share = np.arange(0, width, 2, dtype=np.float32) / np.float32(max(width, 1))
    return (np.float32(1) / np.float32(ROTARY_BASE) ** share).astype(np.float32)


def rotary_tables(first: int, n: int, width: int) -> tuple[Float[np.ndarray, "N R"], Float[np.ndarray, "N R"]]:
    """Return cosines and sines of `n` positions from `first` on. Each angle occurs twice, for a pair of adjacent values."""
    angle = np.arange(first, first + n, dtype=np.float32)[:, None] * rotary_frequencies(width)
    angle = np.repeat(angle, 2, axis=-1)
    return np.cos(angle), np.sin(angle)


def rotate(x: Float[Array, "B *H N K"], first: int | Places, width: int) -> Float[Array, "B *H N K"]:
    """Apply rotary embeddings to adjacent pairs of the first `width` values; the others are unchanged. Positions count up from
    `first`, or are given for every row."""
    if not width:
        return x
    if isinstance(first, int):
        cos, sin = rotary_tables(first, x.shape[-2], width)
    else:
        cos, sin = (jnp.asarray(table)[first.of_query] for table in rotary_tables(0, first.n, width))
        if x.ndim == 4:
            cos, sin = cos[:, None], sin[:, None]
    turned = x[..., :width].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    across = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(turned.shape)
    return jnp.concatenate([(turned * cos + across * sin).astype(x.dtype), x[..., width:]], axis=-1)


def bucket(distance: Int[np.ndarray, "*N"]) -> Int[np.ndarray, "*N"]:
    """Return the bucket of a distance: one per near distance, logarithmic for far ones."""
    near = N_BUCKET // 2
    distance = np.maximum(distance, 0)
    with np.errstate(divide="ignore"):
        # In float32 like the reference, because rounding decides the bucket.
        share = np.log(distance.astype(np.float32) / np.float32(near)) / np.float32(math.log(MAX_DISTANCE / near))
        far = near + np.maximum(share * np.float32(N_BUCKET - near), 0).astype(np.int64)
    return np.where(distance < near, distance, np.minimum(far, N_BUCKET - 1))


def position_bias(table: Float[Array, "32 H"], first: int, n: int) -> Float[Array, "H N S"]:
    """Return the bias of `n` tokens from `first` on towards the null key and all tokens up to the last. The null key has position 0,
    so a token's own key and the one before it are both at distance 0, as in the reference."""
    query, key = np.arange(first, first + n)[:, None], np.arange(first + n + 1)
    return jnp.moveaxis(table[bucket(query - key)], -1, 0)


def row_bias(table: Float[Array, "32 H"], places: Places) -> Float[Array, "B H N S"]:
    """Variant of `position_bias` for positions that differ between rows."""
    distance = jnp.maximum(places.of_query[:, :, None] - places.of_key[:, None], 0)
    return jnp.moveaxis(table[jnp.asarray(bucket(np.arange(places.n)))[distance]], -1, 1)


def visible(first: int, n: int) -> Bool[np.ndarray, "N S"]:
    return np.arange(first + n + 1) <= np.arange(first, first + n)[:, None] + 1


def scaled_key(k: Float[Array, "*B K"], cfg: PriorConfig) -> Float[Array, "*B K"]:
    """Scale keys for cosine scores. Keys are cached in this form."""
    if cfg.scores != "cosine":
        return k
    return (unit(k.astype(jnp.float32)) * math.sqrt(COSINE_SCALE)).astype(k.dtype)


def keys_values(
    x: Float[Array, "B N D"], p: LayerParams, first: int | Places, cfg: PriorConfig
) -> tuple[Float[Array, "B N K"], Float[Array, "B N K"]]:
    """Return keys and values of normalised tokens at positions from `first` on."""
    k, v = jnp.split(times(x, p.w_kv)[..., : 2 * cfg.d_head], 2, axis=-1)
    return scaled_key(rotate(k, first, cfg.n_rotated), cfg), v


def attend(
    x: Float[Array, "B N D"],
    p: LayerParams,
    keys: Float[Array, "B S K"],
    values: Float[Array, "B S K"],
    bias: Float[Array, "*B H N S"],
    seen: Bool[Array, "*B N S"],
    first: int | Places,
    cfg: PriorConfig,
    dropout: PRNGKeyArray | None = None,
) -> Float[Array, "B N D"]:
    """Attend from normalised tokens to all keys that are `seen`. All heads share the keys (multi-query attention)."""
    n_row, n_token, _ = x.shape
    q = times(x, p.w_q)[..., : cfg.n_head * cfg.d_head]
    q = q.reshape(n_row, n_token, cfg.n_head, cfg.d_head).transpose(0, 2, 1, 3)  # B H N K
    q = rotate(q, first, cfg.n_rotated)
    q = scaled_key(q, cfg) if cfg.scores == "cosine" else q * cfg.d_head**-0.5
    flat = q.reshape(n_row, -1, cfg.d_head)
    score = jnp.einsum("bqk,bsk->bqs", flat, keys, preferred_element_type=jnp.float32)
    score = score.reshape(n_row, cfg.n_head, n_token, -1) + bias
    score = jnp.where(jnp.expand_dims(seen, -3), score, HIDDEN)
    weight = drop(jax.nn.softmax(score, axis=-1), dropout, cfg.p_drop_attention).astype(values.dtype)
    mixed = jnp.einsum("bqs,bsk->bqk", weight.reshape(n_row, -1, keys.shape[1]), values)
    mixed = mixed.reshape(n_row, cfg.n_head, n_token, -1).transpose(0, 2, 1, 3).reshape(n_row, n_token, -1)
    return layer_norm(times(mixed, p.w_out)[..., : cfg.dim], p.out_gain, cfg.norms)


def feed_forward(
    x: Float[Array, "B N D"], p: LayerParams, cfg: PriorConfig, dropout: PRNGKeyArray | None = None
) -> Float[Array, "B N D"]:
    hidden = cfg.dim * cfg.ff_mult
    value, gate = jnp.split(times(layer_norm(x, p.ff_gain, cfg.norms), p.w_in)[..., : 2 * hidden], 2, axis=-1)
    y = value * jax.nn.silu(gate)
    if p.mid_gain is not None:
        y = layer_norm(y, p.mid_gain, cfg.norms)
    return times(drop(y, dropout, cfg.p_drop_ff), p.w_back)[..., : cfg.dim]


def drop(x: Array, keys: PRNGKeyArray | None, chance: float) -> Array:
    """Apply dropout with one key per row, so that the result does not depend on how the batch is split."""
    if keys is None or chance == 0.0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - chance, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - chance), 0).astype(x.dtype)
