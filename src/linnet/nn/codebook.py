"""Codebooks of quantised keys, learned by exponential moving averages of the assigned keys, never by gradient.

Letters: B batch, H heads, T tokens, S codes, K key width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.core.pytree import pytree

MIN_COUNT = 0.01  # lower bound of the count that a code's sum is divided by


@pytree
class CodeStatistics:
    """Number and sum of the keys assigned to each code in a batch: the input of the codebook update."""

    count: Float[Array, "*G H S"]
    total: Float[Array, "*G H S K"]


def code_vectors(count: Float[Array, "*G H S"], total: Float[Array, "*G H S K"]) -> Float[Array, "*G H S K"]:
    return jax.lax.stop_gradient(total / jnp.maximum(count, MIN_COUNT)[..., None])


def nearest(keys: Float[Array, "*B H T K"], codes: Float[Array, "H S K"]) -> Int[Array, "*B H T"]:
    """Return the index of the nearest code. |k|^2 is the same for every code and omitted; ties go to the lowest index."""
    wide = codes.astype(jnp.float32)
    half_square = 0.5 * jnp.sum(wide * wide, axis=-1)
    closeness = jnp.einsum("...htk,hsk->...hts", keys.astype(jnp.float32), wide) - half_square[:, None]
    return jnp.argmax(closeness, axis=-1).astype(jnp.int32)


def lookup(codes: Float[Array, "H S K"], chosen: Int[Array, "*B H T"]) -> Float[Array, "*B H T K"]:
    heads = jnp.arange(codes.shape[0], dtype=chosen.dtype)[:, None]
    return codes[heads, chosen]


def straight_through(keys: Float[Array, "*B H T K"], quantised: Float[Array, "*B H T K"]) -> Float[Array, "*B H T K"]:
    """Straight-through estimator: the value of the quantised keys with the gradient of the keys."""
    return quantised + (keys - jax.lax.stop_gradient(keys))


def statistics(
    keys: Float[Array, "B H T K"], chosen: Int[Array, "B H T"], mask: Float[Array, "B T"], n_code: int
) -> CodeStatistics:
    """Count and sum the unmasked keys per code. One scatter of rows is ten times cheaper on CPU than a one-hot matmul."""
    batch, n_head, length, width = keys.shape
    weight = jnp.broadcast_to(mask[:, None, :, None], (batch, n_head, length, 1)).astype(jnp.float32)
    rows = jnp.concatenate([keys.astype(jnp.float32) * weight, weight], axis=-1)
    segment = chosen + n_code * jnp.arange(n_head, dtype=chosen.dtype)[:, None]
    sums = jax.ops.segment_sum(rows.reshape(-1, width + 1), segment.reshape(-1), n_head * n_code)
    sums = jax.lax.stop_gradient(sums.reshape(n_head, n_code, width + 1))
    return CodeStatistics(count=sums[..., width], total=sums[..., :width])


def moving_average(
    count: Float[Array, "*G H S"], total: Float[Array, "*G H S K"], seen: CodeStatistics, gamma: float
) -> tuple[Float[Array, "*G H S"], Float[Array, "*G H S K"]]:
    return gamma * count + (1 - gamma) * seen.count, gamma * total + (1 - gamma) * seen.total


def draw_keys(
    keys: Float[Array, "B H T K"], mask: Float[Array, "B T"], n: int, key: PRNGKeyArray
) -> Float[Array, "H n K"]:
    """Draw `n` random unmasked keys for each head: a uniform rank among the unmasked positions, located in their running count."""
    running = jnp.cumsum(mask.reshape(-1) > 0)
    rank = jnp.floor(jax.random.uniform(key, (n,)) * running[-1]).astype(running.dtype)
    position = jnp.minimum(jnp.searchsorted(running, rank, side="right"), running.size - 1)
    rows = keys.swapaxes(0, 1).reshape(keys.shape[1], -1, keys.shape[-1])
    return jax.lax.stop_gradient(rows[:, position].astype(jnp.float32))


def restart_dead(
    count: Float[Array, "*G H S"], total: Float[Array, "*G H S K"], candidates: Float[Array, "*G H S K"], below: float
) -> tuple[Float[Array, "*G H S"], Float[Array, "*G H S K"]]:
    """Move dead codes onto keys of this batch with a count of one, so that keys are assigned to them again."""
    dead = count < below
    return jnp.where(dead, 1.0, count), jnp.where(dead[..., None], candidates, total)
