"""Causal grouped-query attention (GQA) with soft-capped scores.

Letters: B rows, T tokens, Q query heads, H key heads, J = Q / H query heads per key head, K key width, S keys of a block.

Two implementations with the same result. `attend` takes complete sequences and has a gradient. `gqa_cached` reads a KV cache block
by block, only as far as it is filled, with a running softmax; a block with no key visible to a query leaves its state bit-identical.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from linnet.core.pytree import pytree

NEG_INF = -1e30  # a masked score; finite, so that the difference of two masked scores is not NaN
QUERY_BLOCK = 128


@pytree
class SoftCap:
    """Scale and tanh soft cap that turn q . k into an attention score."""

    scale: Any
    cap: Any


def capped(raw: Float[Array, "*B"], scores: SoftCap) -> Float[Array, "*B"]:
    return scores.cap * jnp.tanh(raw * scores.scale / scores.cap)


def attend(
    q: Float[Array, "B T Q K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    real: Bool[Array, "B T"],
    scores: SoftCap,
) -> Float[Array, "B T Q K"]:
    """Attend from blocks of queries to all keys up to the end of each block, so that scores need a sixteenth of the memory and
    little of the masked future is computed. `real`: which keys may be attended to."""
    n_token = q.shape[1]
    size = max(QUERY_BLOCK, -(-n_token // 16))
    blocks = [
        _attend_block(
            q[:, at : at + size],
            k[:, : at + size],
            v[:, : at + size],
            real[:, : at + size],
            at,
            scores.scale,
            scores.cap,
        )
        for at in range(0, n_token, size)
    ]
    return jnp.concatenate(blocks, axis=1)


@jax.checkpoint
def _attend_block(
    q: Float[Array, "B T Q K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    real: Bool[Array, "B S"],
    at: Int[Array, ""],
    scale: Float[Array, ""],
    cap: Float[Array, ""],
) -> Float[Array, "B T Q K"]:
    """Attend from one block of queries. Attention weights are recomputed in the backward pass, because they dominate memory."""
    raw = grouped_scores(q, k)
    position = at + jnp.arange(q.shape[1])
    visible = (jnp.arange(k.shape[1]) <= position[:, None]) & real[:, None]  # B T S
    score = jnp.where(visible[:, None, None], capped(raw, SoftCap(scale=scale, cap=cap)), NEG_INF)
    weight = jax.nn.softmax(score, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhjts,bshk->bthjk", weight, v)
    return mixed.reshape(q.shape)


def grouped_scores(q: Float[Array, "B T Q K"], k: Float[Array, "B S H K"]) -> Float[Array, "B H J T S"]:
    """Return q . k in float32; consecutive query heads share a key head."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    return jnp.einsum("bthjk,bshk->bhjts", grouped, k, preferred_element_type=jnp.float32)


def gqa_cached(
    q: Float[Array, "T Q K"],
    position: Int[Array, " T"],
    read: Any,
    n_key: Int[Array, ""],
    block_len: int,
    scores: SoftCap,
) -> Float[Array, "T Q K"]:
    """Attend from queries of one sequence to its KV cache. `read(i)` returns block i: keys H S K, values H S K, and which keys are
    real [S]. A query sees keys up to its own position."""
    n_token, _, width = q.shape
    first = jax.eval_shape(read, jnp.int32(0))
    n_head = first[0].shape[0]
    grouped = q.reshape(n_token, n_head, -1, width).transpose(1, 2, 0, 3).reshape(n_head, -1, width)  # H JT K
    rows = grouped.shape[1]
    at = jnp.tile(position, rows // n_token)

    def block(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = state
        keys, values, real = read(i)
        raw = jnp.einsum("hrk,hsk->hrs", grouped, keys, preferred_element_type=jnp.float32)
        visible = (i * block_len + jnp.arange(block_len) <= at[:, None]) & real
        score = jnp.where(visible, capped(raw, scores), NEG_INF)
        higher = jnp.maximum(highest, jnp.max(score, axis=-1))
        weight = jnp.where(visible, jnp.exp(score - higher[..., None]), 0.0)
        shrink = jnp.exp(highest - higher)
        total = total * shrink + jnp.sum(weight, axis=-1)
        more = jnp.einsum("hrs,hsk->hrk", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return higher, total, mixed * shrink[..., None] + more

    empty = (
        jnp.full((n_head, rows), NEG_INF, jnp.float32),
        jnp.zeros((n_head, rows), jnp.float32),
        jnp.zeros((n_head, rows, width), jnp.float32),
    )
    _, total, mixed = jax.lax.fori_loop(0, -(-n_key // block_len), block, empty)
    mixed = mixed / jnp.maximum(total, 1e-30)[..., None]
    mixed = mixed.reshape(n_head, -1, n_token, width).transpose(2, 0, 1, 3)
    return mixed.reshape(q.shape).astype(q.dtype)
