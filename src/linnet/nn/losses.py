"""Log-probabilities from logits, without materialising the normalised distribution. Letters: A vocabulary, n requested tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_nll(scores: Float[Array, "*B A"], targets: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return -log p(target) in nats."""
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - chosen


def top_logprobs(scores: Float[Array, "*B A"], n: int) -> tuple[Int[Array, "*B n"], Float[Array, "*B n"]]:
    """Return the ids of the `n` highest logits in descending order, and their log-probabilities."""
    values, ids = jax.lax.top_k(scores, n)
    return ids, values - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
