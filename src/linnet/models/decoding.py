"""Several ticks in one program: read a token, draw the next, read that. The same for every family that writes tokens."""

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
    """Reads `tokens`, then each token it draws. `seen` counts each row's tokens so far. The draw of a row's p-th token takes its key
    at p, so the number of ticks a call makes no difference. Feed the last row of tokens next. With `n_top`, also that many of the
    likeliest tokens at each tick and their log-probabilities. `n`: fewer ticks than there is room for; the rest is left zero."""
    rows = jnp.arange(tokens.shape[0])
    # All random numbers at once, outside the loop: there each draw would cost a tenth of a tick.
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
