"""The dense baseline: the same attention in O(T^2), optimized for speed and memory so that the comparison is fair.

Queries are processed in chunks of C. A chunk attends to its own keys and those of the window before it at once (with positions and a
causal mask), then to all older keys chunk by chunk with an online softmax. Keys after a query's chunk are skipped, and no T x T
matrix is materialized. The backward pass recomputes the attention weights.

Letters: B batch, H heads, T tokens, K key width, V value width, M window, R = M + 1 distances, C chunk.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim as slice_rows
from jax.lax import dynamic_update_slice_in_dim as update_rows
from jaxtyping import Array, Float, Int

from linnet.nn.vq_attention import Queries

MAX_CHUNK = 512


class Chunking(NamedTuple):
    """Lengths in tokens."""

    chunk: int
    block_len: int
    window: int


class Saved(NamedTuple):
    """Residuals for the backward pass; `log_sum` is the logarithm of each softmax denominator."""

    content: Float[Array, "T K"]
    position: Float[Array, "T K"]
    keys: Float[Array, "T K"]
    values: Float[Array, "T V"]
    distances: Float[Array, "R K"]
    out: Float[Array, "T V"]
    log_sum: Float[Array, " T"]


def chunk_len(n_token: int, block_len: int) -> int:
    """Return the largest multiple of the block length that divides T and is at most `MAX_CHUNK`."""
    n_block, rest = divmod(n_token, block_len)
    assert not rest, f"{n_token} tokens are not a multiple of the block length {block_len}"
    fits = [n for n in range(1, n_block + 1) if n_block % n == 0 and n * block_len <= MAX_CHUNK]
    return max(fits, default=1) * block_len


def dense_attention(
    queries: Queries,
    keys: Float[Array, "B H T K"],
    values: Float[Array, "B H T V"],
    distances: Float[Array, "H R K"],
    *,
    block_len: int,
) -> Float[Array, "B H T V"]:
    """Compute the same as `attention_dense` with `agg_cache` and `grad_thru_cache` and without `reset`, including gradients."""
    chunking = Chunking(chunk_len(values.shape[2], block_len), block_len, distances.shape[1] - 1)
    one_head = functools.partial(_attend, chunking)
    heads = jax.vmap(one_head)
    rows = jax.vmap(heads, in_axes=(0, 0, 0, 0, None))
    return rows(queries.content, queries.position, keys, values, distances)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    chunking: Chunking,
    content: Float[Array, "T K"],
    position: Float[Array, "T K"],
    keys: Float[Array, "T K"],
    values: Float[Array, "T V"],
    distances: Float[Array, "R K"],
) -> Float[Array, "T V"]:
    return _forward(chunking, content, position, keys, values, distances)[0]


def _forward(
    chunking: Chunking,
    content: Float[Array, "T K"],
    position: Float[Array, "T K"],
    keys: Float[Array, "T K"],
    values: Float[Array, "T V"],
    distances: Float[Array, "R K"],
) -> tuple[Float[Array, "T V"], Saved]:
    c, m = chunking.chunk, chunking.window
    all_keys, all_values = _pad_front(keys, m), _pad_front(values, m)

    def chunk_of_queries(i: Int[Array, ""]) -> tuple[Float[Array, "C V"], Float[Array, " C"]]:
        q, q_position = slice_rows(content, i * c, c), slice_rows(position, i * c, c)
        scores = _near_scores(chunking, i, q, q_position, slice_rows(all_keys, i * c, c + m), distances)
        top = jnp.max(scores, axis=-1)  # finite, because a query attends to its own position
        weight = jnp.exp(scores - top[:, None])
        near = (top, jnp.sum(weight, axis=-1), _product(weight, slice_rows(all_values, i * c, c + m)))

        def chunk_of_keys(j: Int[Array, ""], seen: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, mixed = seen
            scores = _far_scores(chunking, j, q, slice_rows(all_keys, j * c, c))
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weight, shrink = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            mixed = mixed * shrink[:, None] + _product(weight, slice_rows(all_values, j * c, c))
            return new_top, total * shrink + jnp.sum(weight, axis=-1), mixed

        top, total, mixed = jax.lax.fori_loop(0, i, chunk_of_keys, near)
        return mixed / total[:, None], top + jnp.log(total)

    out, log_sum = jax.lax.map(chunk_of_queries, jnp.arange(values.shape[0] // c))
    out, log_sum = out.reshape(values.shape).astype(values.dtype), log_sum.reshape(-1)
    return out, Saved(content, position, keys, values, distances, out, log_sum)


def _backward(chunking: Chunking, saved: Saved, d_out: Float[Array, "T V"]) -> tuple[Array, Array, Array, Array, Array]:
    c, m = chunking.chunk, chunking.window
    all_keys, all_values = _pad_front(saved.keys, m), _pad_front(saved.values, m)
    # A softmax's gradient is weight * (d_weight - sum of weight * d_weight), and that sum is out . d_out.
    mean = jnp.sum(saved.out.astype(jnp.float32) * d_out, axis=-1)
    row, column = jnp.arange(c)[:, None], jnp.arange(c + m)[None, :]
    # Keys older than their block's window get no gradient from the scores.
    learns = column >= row // chunking.block_len * chunking.block_len

    def chunk_of_queries(
        grads: tuple[Array, Array, Array], i: Int[Array, ""]
    ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
        d_keys, d_values, d_distances = grads
        q, q_position, d = (slice_rows(x, i * c, c) for x in (saved.content, saved.position, d_out))
        log_sum, chunk_mean = slice_rows(saved.log_sum, i * c, c)[:, None], slice_rows(mean, i * c, c)[:, None]
        near_keys = slice_rows(all_keys, i * c, c + m)
        near = functools.partial(_near_scores, chunking, i)
        weight = jnp.exp(near(q, q_position, near_keys, saved.distances) - log_sum)
        d_scores = weight * (_product(d, slice_rows(all_values, i * c, c + m).T) - chunk_mean)
        d_values = _add(d_values, i * c, _product(weight.T, d))
        d_keys = _add(d_keys, i * c, _product(jnp.where(learns, d_scores, 0.0).T, q))
        position_scores = functools.partial(_position_scores, chunking)
        d_position, more = jax.vjp(position_scores, q_position, saved.distances)[1](d_scores)

        def chunk_of_keys(j: Int[Array, ""], so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            d_content, d_values = so_far
            far_keys = slice_rows(all_keys, j * c, c)
            weight = jnp.exp(_far_scores(chunking, j, q, far_keys) - log_sum)
            d_scores = weight * (_product(d, slice_rows(all_values, j * c, c).T) - chunk_mean)
            return d_content + _product(d_scores, far_keys), _add(d_values, j * c, _product(weight.T, d))

        d_content, d_values = jax.lax.fori_loop(0, i, chunk_of_keys, (_product(d_scores, near_keys), d_values))
        return (d_keys, d_values, d_distances + more), (d_content, d_position)

    like = (all_keys, all_values, saved.distances)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    n_chunk = jnp.arange(d_out.shape[0] // c)
    (d_keys, d_values, d_distances), (d_content, d_position) = jax.lax.scan(chunk_of_queries, zeros, n_chunk)
    return (
        d_content.reshape(saved.content.shape).astype(saved.content.dtype),
        d_position.reshape(saved.position.shape).astype(saved.position.dtype),
        d_keys[m:].astype(saved.keys.dtype),
        d_values[m:].astype(saved.values.dtype),
        d_distances.astype(saved.distances.dtype),
    )


_attend.defvjp(_forward, _backward)


def _near_scores(
    chunking: Chunking,
    i: Int[Array, ""],
    q: Float[Array, "C K"],
    q_position: Float[Array, "C K"],
    keys: Float[Array, "W K"],
    distances: Float[Array, "R K"],
) -> Float[Array, "C W"]:
    """Scores of chunk i against its own keys and the M before it: column c is M - c keys before the chunk's first query."""
    row, column = jnp.arange(chunking.chunk)[:, None], jnp.arange(chunking.chunk + chunking.window)[None, :]
    seen = (column <= row + chunking.window) & (i * chunking.chunk + column >= chunking.window)
    return jnp.where(seen, _product(q, keys.T) + _position_scores(chunking, q_position, distances), -jnp.inf)


def _position_scores(
    chunking: Chunking, q_position: Float[Array, "C K"], distances: Float[Array, "R K"]
) -> Float[Array, "C W"]:
    """Position term of the scores: row a has its M + 1 values at columns a to a + M, the farthest first, and zeros elsewhere."""
    c, m = chunking.chunk, chunking.window
    by_distance = _product(q_position, distances[::-1].T)
    # Rows padded to one more than the target length and reshaped to it: each row is shifted by one relative to the row above.
    return jnp.pad(by_distance, ((0, 0), (0, c))).reshape(-1)[: c * (c + m)].reshape(c, c + m)


def _far_scores(
    chunking: Chunking, j: Int[Array, ""], q: Float[Array, "C K"], keys: Float[Array, "C K"]
) -> Float[Array, "C C"]:
    """Scores against chunk j of the padded keys, all older than the window; the padding is masked."""
    real = j * chunking.chunk + jnp.arange(chunking.chunk) >= chunking.window
    return jnp.where(real, _product(q, keys.T), -jnp.inf)


def _product(a: Float[Array, "I J"], b: Float[Array, "J E"]) -> Float[Array, "I E"]:
    return jnp.matmul(a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _add(total: Float[Array, "T E"], start: Int[Array, ""], part: Float[Array, "C E"]) -> Float[Array, "T E"]:
    return update_rows(total, slice_rows(total, start, part.shape[0]) + part, start, 0)


def _pad_front(x: Float[Array, "T E"], n: int) -> Float[Array, "T2 E"]:
    return jnp.pad(x, ((n, 0), (0, 0)))
