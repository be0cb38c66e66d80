"""Decode programs: several decoding steps (read a token, sample the next) in one program, for every token family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from linnet.models.decoder import DecodeProgram
from linnet.models.tensor_parallel import Shard, TensorParallel, tp_call
from linnet.nn.batch_invariant import COMPILER_OPTIONS
from linnet.nn.losses import top_logprobs
from linnet.nn.sampling import LogitMask, SamplingSettings, sample, uniforms

Top = tuple[Int[Array, "n B K"], Float[Array, "n B K"]]


def decode_loop(
    tick: Callable[[Any, Int[Array, " B"]], tuple[Any, Float[Array, "B A"]]],
    slots: Any,
    tokens: Int[Array, " B"],
    settings: SamplingSettings,
    keys: Key[Array, " B"],
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
        slots, seen, tokens, sampled = state
        slots, logits = tick(slots, tokens)
        tokens, logprobs = sample(logits, settings, chances[i], seen, rules, slots.position)
        new = (tokens, logprobs, top_logprobs(logits, n_top) if n_top else None)
        sampled = jax.tree.map(lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0), sampled, new)
        return slots, seen.at[rows, tokens].add(1), tokens, sampled

    def zeros(dtype: Any, *shape: int) -> Array:
        return jnp.zeros((n_ticks, tokens.shape[0], *shape), dtype)

    top = (zeros(jnp.int32, n_top), zeros(jnp.float32, n_top)) if n_top else None
    sampled = (zeros(jnp.int32), zeros(jnp.float32), top)
    slots, seen, _, (drawn, logprobs, top) = jax.lax.fori_loop(
        0, n_ticks if n is None else n, step, (slots, seen, tokens, sampled)
    )
    return slots, seen, drawn, logprobs, top


class Tick(Protocol):
    def __call__(
        self,
        prepared: Any,
        slots: Any,
        tokens: Int[Array, " B"],
        active: Bool[Array, " B"],
        cfg: Any,
        tp: TensorParallel,
        /,
    ) -> tuple[Any, Float[Array, "B A"]]:
        """Read one token in every active slot, and return the slots and the logits of the next token. Inactive slots may tick too:
        their contents are meaningless. On a mesh, all arguments belong to one device's shard of the model."""
        ...


def tick_program(tick: Tick, shard: Shard | None = None, options: dict[str, Any] = COMPILER_OPTIONS) -> Any:
    """Return the program of a single tick, without sampling. `shard`: for models that can be sharded."""

    @partial(jax.jit, static_argnames="cfg", donate_argnames="slots", compiler_options=options)
    def one_tick(
        prepared: Any, slots: Any, tokens: Int[Array, " B"], cfg: Any, active: Bool[Array, " B"] | None = None
    ) -> tuple[Any, Float[Array, "B A"]]:
        """Read one token in every active slot and return the logits of the next."""

        def run(
            prepared: Any, slots: Any, cfg: Any, tp: TensorParallel, tokens: Array, active: Array
        ) -> tuple[Any, Array]:
            return tick(prepared, slots, tokens, active, cfg, tp)

        active = jnp.ones(tokens.shape, bool) if active is None else active
        slots, logits = tp_call(run, shard, prepared, slots, cfg, tokens, active)
        return slots, logits

    return one_tick


def decode_program(tick: Tick, shard: Shard | None = None, options: dict[str, Any] = COMPILER_OPTIONS) -> DecodeProgram:
    """Return the program that runs `decode_loop` with this tick. The slots and the counts of ids are donated. `shard`: for models that
    can be sharded."""

    @partial(
        jax.jit,
        static_argnames=("cfg", "n_ticks", "n_top"),
        donate_argnames=("slots", "seen"),
        compiler_options=options,
    )
    def decode(
        prepared: Any,
        slots: Any,
        tokens: Int[Array, " B"],
        settings: SamplingSettings,
        keys: Key[Array, " B"],
        seen: Int[Array, "B A"],
        rules: LogitMask | None = None,
        active: Bool[Array, " B"] | None = None,
        n: int | Int[Array, ""] | None = None,
        *,
        cfg: Any,
        n_ticks: int,
        n_top: int = 0,
    ) -> tuple[Any, Int[Array, "B A"], Int[Array, "n B"], Float[Array, "n B"], Top | None]:
        def run(prepared: Any, slots: Any, cfg: Any, tp: TensorParallel, *given: Any) -> tuple[Any, ...]:
            tokens, active, settings, keys, seen, rules, n = given

            def one(slots: Any, tokens: Int[Array, " B"]) -> tuple[Any, Float[Array, "B A"]]:
                return tick(prepared, slots, tokens, active, cfg, tp)

            return decode_loop(one, slots, tokens, settings, keys, seen, rules, n_ticks, n_top, n)

        active = jnp.ones(tokens.shape, bool) if active is None else active
        given = (tokens, active, settings, keys, seen, rules, n)
        slots, seen, sampled, logprobs, top = tp_call(run, shard, prepared, slots, cfg, *given)
        return slots, seen, sampled, logprobs, top

    return decode
