"""Several ticks in one program: read a token, draw the next, read that. The same for every family that writes tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from linnet.nn.likelihood import likeliest
from linnet.nn.sampling import Rules, SamplingSettings, sample, uniforms

Top = tuple[Int[Array, "n B K"], Float[Array, "n B K"]]


def draw(
    tick: Callable[[Any, Int[Array, " B"]], tuple[Any, Float[Array, "B A"]]],
    slots: Any,
    tokens: Int[Array, " B"],
    settings: SamplingSettings,
    keys: PRNGKeyArray,
    seen: Int[Array, "B A"],
    rules: Rules | None,
    n_ticks: int,
    n_top: int,
) -> tuple[Any, Int[Array, "B A"], Int[Array, "n B"], Float[Array, "n B"], Top | None]:
    """Reads `tokens`, then each token it draws. `seen` counts each row's tokens so far. The draw of a row's p-th token takes its key
    at p, so the number of ticks a call makes no difference. Feed the last row of tokens next. With `n_top`, also that many of the
    likeliest tokens at each tick and their log-probabilities."""
    rows = jnp.arange(tokens.shape[0])
    # All random numbers at once, outside the loop: there each draw would cost a tenth of a tick.
    chances = jax.vmap(lambda after: uniforms(keys, slots.position + after))(1 + jnp.arange(n_ticks))

    def step(state: tuple[Any, Array, Array], chance: Float[Array, " B"]) -> tuple[tuple[Any, Array, Array], Any]:
        slots, seen, tokens = state
        slots, logits = tick(slots, tokens)
        tokens, logprobs = sample(logits, settings, chance, seen, rules, slots.position)
        top = likeliest(logits, n_top) if n_top else None
        return (slots, seen.at[rows, tokens].add(1), tokens), (tokens, logprobs, top)

    (slots, seen, _), (drawn, logprobs, top) = jax.lax.scan(step, (slots, seen, tokens), chances)
    return slots, seen, drawn, logprobs, top
