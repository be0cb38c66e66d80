"""The train state (everything that a checkpoint holds and the next step needs), and its shardings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, UInt32

from linnet.config.schema import RunConfig
from linnet.core import params as weights
from linnet.core import rng
from linnet.core.pytree import leaf_name, named_leaves, pytree, replace
from linnet.models.base import ModelFamily
from linnet.optim.lora import trainable_specs, weights_of
from linnet.parallel import sharding


@pytree
class TrainState:
    step: Int[Array, ""]
    params: Any
    buffers: Any
    carry: Any
    """Model state carried between the updates of one sequence; None if a sequence is one update."""
    opt_state: Any
    ema: Any
    """EMA of the parameters, or None."""
    key: UInt32[Array, ...]
    """Key data of the PRNG key from which all of the run's keys are derived."""
    skipped: Int[Array, ""]
    """Number of updates skipped because the loss or gradient was not finite."""
    consecutive_nonfinite: Int[Array, ""]
    """Number of consecutive skipped updates up to now. Checkpoints name it `bad_run`."""
    base: Any = None
    """With adapters: the frozen weights. They are stored once next to the checkpoints, not in each of them."""


def fresh_state(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    return make_state(family, cfg, optimizer, sharding.make_mesh() if mesh is None else mesh)()


def make_state(family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Return a jitted function without arguments that initializes the state directly in its sharding.

    No device or host ever holds more than its own shards.
    """
    key = rng.root(cfg.seed)

    def make() -> TrainState:
        params = weights.init(family.param_specs(cfg.model), rng.fold_in_name(key, "params"))
        return state_from_params(family, cfg, optimizer, params, fresh_buffers(family, cfg))

    return jax.jit(make, out_shardings=state_shardings(family, cfg, optimizer, mesh))


def fresh_buffers(family: ModelFamily, cfg: RunConfig) -> Any:
    return weights.init(family.buffer_specs(cfg.model), rng.fold_in_name(rng.root(cfg.seed), "buffers"))


def state_from_params(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, params: Any, buffers: Any
) -> TrainState:
    """Return the state of step 0 with the given weights: of a new run, an imported model, or the base of adapters."""
    base = None
    if cfg.lora.rank:
        base, params = (
            params,
            weights.init(trainable_specs(family, cfg), rng.fold_in_name(rng.root(cfg.seed), "adapters")),
        )
    return TrainState(
        base=base,
        step=jnp.zeros((), jnp.int32),
        params=params,
        buffers=buffers,
        carry=family.empty_carry(cfg.model, cfg.data.batch_size) if cfg.data.updates_per_sequence > 1 else None,
        opt_state=optimizer.init(params),
        # A copy: the step donates the state, and a buffer cannot be donated twice.
        ema=jax.tree.map(jnp.copy, params) if cfg.train.ema_decay is not None else None,
        key=jax.random.key_data(rng.root(cfg.seed)),
        skipped=jnp.zeros((), jnp.int32),
        consecutive_nonfinite=jnp.zeros((), jnp.int32),
    )


def init_state_from(
    family: ModelFamily,
    cfg: RunConfig,
    optimizer: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    buffers: Any = None,
    **kept: Any,
) -> TrainState:
    """Return the state of step 0 with weights that are already on the mesh, and are donated.

    The rest of the state is created directly in its sharding. Buffers are initialized if None; `kept` are other fields of the state
    (opt_state, ema) to use where they are not None.
    """
    given = {name: value for name, value in kept.items() if value is not None}

    def start(params: Any, buffers: Any, given: dict[str, Any]) -> TrainState:
        buffers = fresh_buffers(family, cfg) if buffers is None else buffers
        return replace(state_from_params(family, cfg, optimizer, params, buffers), **given)

    begin = jax.jit(start, out_shardings=state_shardings(family, cfg, optimizer, mesh), donate_argnums=(0, 1, 2))
    return begin(params, buffers, given)


def abstract_state(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Return shapes, dtypes and shardings of the state, to restore a checkpoint into or to compile for."""
    mesh = sharding.make_mesh() if mesh is None else mesh
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        _shapes(family, cfg, optimizer),
        state_shardings(family, cfg, optimizer, mesh),
    )


def _shapes(family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    def make() -> TrainState:
        params = weights.init(family.param_specs(cfg.model), rng.root(0))
        return state_from_params(family, cfg, optimizer, params, fresh_buffers(family, cfg))

    return jax.eval_shape(make)


def state_shardings(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Return the sharding of every leaf.

    Weights, EMA and optimizer state follow the family's logical axis rules, the carry is sharded with its batch rows, and scalars
    are replicated.
    """
    shapes, rules = _shapes(family, cfg, optimizer), family.rules
    everywhere = jax.tree.map(lambda _: sharding.replicated(mesh), shapes)
    specs = trainable_specs(family, cfg)
    params = sharding.shardings(specs, mesh, rules)
    carry = None
    if shapes.carry is not None:
        carry = sharding.named_shardings(shapes.carry, family.carry_axes(shapes.carry), mesh, rules)
    return replace(
        everywhere,
        params=params,
        buffers=sharding.shardings(family.buffer_specs(cfg.model), mesh, rules),
        carry=carry,
        opt_state=_optimizer_shardings(shapes.opt_state, specs, mesh, rules),
        ema=None if shapes.ema is None else params,
        base=None if shapes.base is None else sharding.shardings(family.param_specs(cfg.model), mesh, rules),
    )


def _optimizer_shardings(opt_state: Any, specs: Any, mesh: Mesh, rules: sharding.LogicalAxisRules) -> Any:
    """Shard each optimizer leaf like the weight of the same name.

    A leaf that lacks one of the weight's axes (a mean over it) is sharded by the remaining axes; other leaves are replicated.
    """
    known = dict(named_leaves(specs, is_leaf=weights.is_spec))

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = leaf_name(path)
        spec = next((spec for end, spec in known.items() if name == end or name.endswith(f"/{end}")), None)
        if spec is None or not leaf.ndim:
            return sharding.replicated(mesh)
        if leaf.shape == spec.shape:
            return sharding.named_sharding(leaf.shape, spec.axes, mesh, rules)
        for gone in reversed(range(len(spec.shape))):
            if leaf.shape == spec.shape[:gone] + spec.shape[gone + 1 :]:
                return sharding.named_sharding(leaf.shape, spec.axes[:gone] + spec.axes[gone + 1 :], mesh, rules)
        return sharding.replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, opt_state)


def evaluated_weights(state: TrainState) -> TrainState:
    """Reduce a state (or abstract state) to what is evaluated: parameters, EMA, codebooks and the base of adapters."""
    return replace(state, step=None, carry=None, opt_state=None, key=None, skipped=None, consecutive_nonfinite=None)


def served_weights(state: TrainState) -> TrainState:
    """Reduce a state (or abstract state) to what `model_weights` needs: one set of weights, the codebooks and the base."""
    state = evaluated_weights(state)
    return state if state.ema is None else replace(state, params=None)


def model_weights(state: TrainState) -> tuple[Any, Any]:
    """Return the weights and buffers to evaluate, sample and export: the EMA if there is one, with adapters merged."""
    params = state.params if state.ema is None else state.ema
    return weights_of(params, state.base), state.buffers
