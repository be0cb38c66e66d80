"""The train step: loss and gradient (over micro-batches), optimizer, codebooks and EMA; a nonfinite update is skipped entirely."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.core.pytree import replace
from linnet.models.base import Aux, Keys, ModelFamily
from linnet.optim import ema as moving_average
from linnet.optim.lora import weights_of
from linnet.parallel import sharding
from linnet.runs import environment
from linnet.runs.state import TrainState, state_shardings

Metrics = dict[str, Array]


def make_step(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> Any:
    """Return the jitted update. With several devices, call it under `jax.set_mesh(mesh)`.

    The given state is donated; the new state has the same shardings.
    """
    there = None
    if mesh is not None:
        there = (state_shardings(family, cfg, optimizer, mesh), sharding.replicated(mesh))
    return jax.jit(
        lambda state, batch: update(family, cfg, optimizer, state, batch), donate_argnums=0, out_shardings=there
    )


def compile_step(
    family: ModelFamily,
    cfg: RunConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Any,
    mesh: Mesh | None = None,
) -> Any:
    """Compile the update for this state and batch, and return the compiler's freed memory to the system.

    Otherwise that memory would add to the peak of the first update.
    """
    compiled = make_step(family, cfg, optimizer, mesh).lower(state, batch).compile()
    environment.give_back_memory()
    return compiled


def update(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, state: TrainState, batch: Any
) -> tuple[TrainState, Metrics]:
    keys = _keys(state, cfg)
    loss, aux, gradient = _loss_and_gradient(family, cfg, state, batch, keys)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    buffers = family.update_buffers(state.buffers, aux.statistics, cfg.model)
    ema, how = state.ema, moving_average.settings(cfg.train)
    if how is not None:
        ema = moving_average.update(how, ema, params, state.step)

    def if_finite(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    carry = state.carry
    if carry is not None:  # a nonfinite carry would make the next update nonfinite too
        carry = if_finite(aux.carry, family.empty_carry(cfg.model, cfg.data.batch_size))
    skipped = 1 - finite.astype(jnp.int32)
    after = replace(
        state,
        step=state.step + 1,
        params=if_finite(params, state.params),
        buffers=if_finite(buffers, state.buffers),
        carry=carry,
        opt_state=if_finite(opt_state, state.opt_state),
        ema=None if ema is None else if_finite(ema, state.ema),
        skipped=state.skipped + skipped,
        consecutive_nonfinite=(state.consecutive_nonfinite + 1) * skipped,
    )
    counts = {
        "skipped": after.skipped,
        "bad_run": after.consecutive_nonfinite,
    }  # as metrics.jsonl has always named them
    return after, {**aux.metrics, "loss": loss, "grad_norm": norm, **counts}


def _keys(state: TrainState, cfg: RunConfig) -> Keys:
    root = jax.random.wrap_key_data(state.key)
    sequence = state.step // cfg.data.updates_per_sequence
    return Keys(
        update=rng.fold_in(rng.fold_in_name(root, "update"), state.step),
        sequence=rng.fold_in(rng.fold_in_name(root, "sequence"), sequence),
    )


def _loss_and_gradient(
    family: ModelFamily, cfg: RunConfig, state: TrainState, batch: Any, keys: Keys
) -> tuple[Array, Aux, Any]:
    """Return loss and gradient, averaged over micro-batches.

    The randomness of a row depends on its index in the full batch, so the number of micro-batches does not change it.
    """
    n = cfg.train.accumulate
    carry = _sequence_carry(family, cfg, state)

    def loss_of(params: Any, *rest: Any) -> tuple[Array, Aux]:
        return family.loss(weights_of(params, state.base), *rest)

    gradient_of = jax.value_and_grad(loss_of, has_aux=True)
    if n == 1:
        (loss, aux), gradient = gradient_of(state.params, state.buffers, carry, batch, keys, 0, cfg.model)
        return loss, aux, gradient
    rows = cfg.data.batch_size // n
    carry_axes = family.carry_axes(carry)
    batch_axes = sharding.map_axes(lambda axes: axes.index("batch"), carry_axes)

    def rows_of(x: Array, i: Array, axes: sharding.LogicalAxes) -> Array:
        """Slice the rows of a micro-batch and reshard them over all devices (the slice covers only some)."""
        part = jax.lax.dynamic_slice_in_dim(x, i * rows, rows, axes.index("batch"))
        return sharding.constrain(part, axes, family.rules)

    def one(i: Array) -> tuple[Array, Aux, Any]:
        part = jax.tree.map(lambda x: rows_of(x, i, ("batch", *(None,) * (x.ndim - 1))), batch)
        part_carry = sharding.map_axes(lambda axes, x: rows_of(x, i, axes), carry_axes, carry)
        (loss, aux), gradient = gradient_of(state.params, state.buffers, part_carry, part, keys, i * rows, cfg.model)
        return loss, aux, gradient

    def add(total: tuple[Array, Aux, Any], i: Array) -> tuple[tuple[Array, Aux, Any], Any]:
        loss, aux, gradient = one(i)
        merged = Aux(
            metrics=jax.tree.map(jnp.add, total[1].metrics, aux.metrics),
            statistics=family.merge_statistics(total[1].statistics, aux.statistics),
            carry=None,
        )
        return (total[0] + loss, merged, jax.tree.map(jnp.add, total[2], gradient)), aux.carry

    loss, aux, gradient = one(jnp.zeros((), jnp.int32))
    start = (loss, replace(aux, carry=None), gradient)
    (loss, total, gradient), carries = jax.lax.scan(add, start, jnp.arange(1, n))
    carry = jax.tree.map(lambda first, rest, axis: _join_rows(first, rest, axis), aux.carry, carries, batch_axes)
    loss, metrics, gradient = jax.tree.map(lambda x: x / n, (loss, total.metrics, gradient))
    return loss, Aux(metrics=metrics, statistics=total.statistics, carry=carry), gradient


def _join_rows(first: Array, rest: Array, axis: int) -> Array:
    """Concatenate the rows of the first micro-batch with those of the others, which scan stacked on a leading axis."""
    rest = jnp.moveaxis(rest, 0, axis)
    rest = rest.reshape(*rest.shape[:axis], -1, *rest.shape[axis + 2 :])
    return jnp.concatenate([first, rest], axis=axis)


def _sequence_carry(family: ModelFamily, cfg: RunConfig, state: TrainState) -> Any:
    """Return the carry from the sequence's previous update, or an empty one at its first update."""
    empty = family.empty_carry(cfg.model, cfg.data.batch_size)
    if state.carry is None:
        return empty
    first = state.step % cfg.data.updates_per_sequence == 0
    return jax.tree.map(lambda new, old: jnp.where(first, new, old), empty, state.carry)
