"""The whole state of a training run: what a checkpoint holds, and all that the next step needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, UInt32

from linnet import params as weights
from linnet import rng
from linnet.config import RunConfig
from linnet.families.family import Family
from linnet.pytree import pytree


@pytree
class TrainState:
    step: Int[Array, ""]
    params: Any
    buffers: Any
    carry: Any
    """The state between the updates of one sequence; None when a sequence is one update."""
    opt_state: Any
    ema: Any
    """The moving average of the parameters, or None."""
    key: UInt32[Array, ...]
    """Data of the random key that all streams of the run come from."""
    skipped: Int[Array, ""]
    """Updates skipped because something was not finite."""
    bad_run: Int[Array, ""]
    """How many of the latest updates in a row were skipped."""


def fresh_state(family: Family, cfg: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    key = rng.root(cfg.seed)

    @jax.jit
    def make() -> TrainState:
        params = weights.init(family.param_specs(cfg.model), rng.stream(key, "params"))
        return start_from(family, cfg, optimizer, params, fresh_buffers(family, cfg))

    return make()


def fresh_buffers(family: Family, cfg: RunConfig) -> Any:
    return weights.init(family.buffer_specs(cfg.model), rng.stream(rng.root(cfg.seed), "buffers"))


def start_from(
    family: Family, cfg: RunConfig, optimizer: optax.GradientTransformation, params: Any, buffers: Any
) -> TrainState:
    """Step 0 with given weights: a fresh run, or an imported model."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        buffers=buffers,
        carry=family.empty_carry(cfg.model, cfg.data.batch_size) if cfg.data.updates_per_sequence > 1 else None,
        opt_state=optimizer.init(params),
        # A copy: the step donates the state, and a buffer cannot be donated twice.
        ema=jax.tree.map(jnp.copy, params) if cfg.train.ema_decay is not None else None,
        key=jax.random.key_data(rng.root(cfg.seed)),
        skipped=jnp.zeros((), jnp.int32),
        bad_run=jnp.zeros((), jnp.int32),
    )


def abstract_state(family: Family, cfg: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and types only: what a checkpoint is restored into."""
    return jax.eval_shape(lambda: fresh_state(family, cfg, optimizer))


def model_weights(state: TrainState) -> tuple[Any, Any]:
    """What is evaluated, sampled and exported: the moving average where there is one."""
    return (state.params if state.ema is None else state.ema), state.buffers
