"""Decode loop: several decoding steps (read a token, sample the next) in one program, for every token family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.nn.losses import top_logprobs
from linnet.nn.sampling import LogitMask, SamplingSettings, sample, uniforms

Top = tuple[Int[Array, "n B K"], Float[Array, "n B K"]]


def decode_loop(
    tick: Callable[[Any, Int[Array, " B"]], tuple[Any, Float[Array, "B A"]]],
    slots: Any,
    tokens: Int[Array, " B"],
    settings: SamplingSettings,
    keys: PRNGKeyArray,
    seen: Int[Array, "B A"],
    rules: LogitMask | None,
    n_ticks: int,
    n_top: int,
    n: int | Int[Array, ""] | None = None,
) -> tuple[Any, Int[Array, "B A"], Int[Array, "n B"], Float[Array, "n B"], Top | None]:
    """Read `tokens`, then each sampled token. `seen` counts each row's tokens so far. A row's p-th token is sampled with the key of
    position p, so the number of ticks per call does not affect the result. Pass the last row of the returned tokens to the next call.
    With `n_top`, also return the `n_top` most likely tokens of each tick with their log-probabilities. `n`: run fewer than `n_ticks`
    ticks; the remaining results are zero."""
    rows = jnp.arange(tokens.shape[0])
    # All random numbers are drawn before the loop: drawing inside it would cost a tenth of a tick each.
    chances = jax.vmap(lambda after: uniforms(keys, slots.position + after))(1 + jnp.arange(n_ticks))

    def step(i: Array, state: tuple[Any, Array, Array, Any]) -> tuple[Any, Array, Array, Any]:
        slots, seen, tokens, told = state
        slots, logits = tick(slots, tokens)
        tokens, logprobs = sample(logits, settings, chances[i], seen, rules, slots.position)
        new = (tokens, logprobs, top_logprobs(logits, n_top) if n_top else None)
        told = jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0), told, new)
        return slots, seen.at[rows, tokens].add(1), tokens, told

    def room(dtype: Any, *shape: int) -> Array:
        return jnp.zeros((n_ticks, tokens.shape[0], *shape), dtype)

    top = (room(jnp.int32, n_top), room(jnp.float32, n_top)) if n_top else None
    told = (room(jnp.int32), room(jnp.float32), top)
    slots, seen, _, (drawn, logprobs, top) = jax.lax.fori_loop(
        0, n_ticks if n is None else n, step, (slots, seen, tokens, told)
    )
    return slots, seen, drawn, logprobs, top
