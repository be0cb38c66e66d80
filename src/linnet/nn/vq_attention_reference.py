"""Straightforward O(T^2) implementation of VQ attention: the oracle of the tests and the baseline of the benchmarks.

Letters as in `vq_attention`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.nn.vq_attention import Queries


def attention_dense(
    queries: Queries,
    keys: Float[Array, "B H T K"],
    values: Float[Array, "B H T V"],
    distances: Float[Array, "H R K"],
    documents: Int[Array, "B T"],
    *,
    block_len: int,
    agg_cache: bool,
    grad_thru_cache: bool,
    reset: bool,
) -> Float[Array, "B H T V"]:
    """Attend from every query to every key. The block length affects only gradients: a key older than the block's window gets no
    gradient through its score, and without `grad_thru_cache` keys and values of earlier blocks get no gradient at all."""
    n_token, window = values.shape[2], distances.shape[1] - 1
    query, key = jnp.arange(n_token)[:, None], jnp.arange(n_token)[None, :]
    distance = query - key
    block_start = query // block_len * block_len
    learns_key = key >= (block_start - window if grad_thru_cache else block_start)
    learns_value = jnp.ones_like(learns_key) if grad_thru_cache else key >= block_start

    score = jnp.where(
        learns_key,
        jnp.einsum("bhik,bhjk->bhij", queries.content, keys),
        jnp.einsum("bhik,bhjk->bhij", queries.content, jax.lax.stop_gradient(keys)),
    )
    by_distance = jnp.einsum("bhik,hrk->bhir", queries.position, distances)
    index = jnp.broadcast_to(jnp.clip(distance, 0, window), (*by_distance.shape[:2], n_token, n_token))
    score = score + jnp.where(distance <= window, jnp.take_along_axis(by_distance, index, axis=-1), 0.0)
    seen = (distance >= 0) if agg_cache else (distance >= 0) & (distance <= window)
    if reset:
        seen = seen & (documents[:, :, None] == documents[:, None, :])[:, None]
    weight = jax.nn.softmax(jnp.where(seen, score, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bhjv->bhiv", jnp.where(learns_value, weight, 0.0), values) + jnp.einsum(
        "bhij,bhjv->bhiv", jnp.where(learns_value, 0.0, weight), jax.lax.stop_gradient(values)
    )
