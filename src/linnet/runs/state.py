"""The whole state of a training run: what a checkpoint holds, and all that the next step needs; and where each part of it lies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, UInt32

from linnet.core import params as weights
from linnet.core import rng
from linnet.parallel import sharding
from linnet.config.schema import RunConfig
from linnet.models.base import ModelFamily
from linnet.core.pytree import leaf_name, named_leaves, pytree, replace
from linnet.optim.lora import trainable_specs, weights_of


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
    base: Any = None
    """With adapters: the frozen weights. They are stored once beside the checkpoints, not in each of them."""


def fresh_state(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    return make_state(family, cfg, optimizer, sharding.make_mesh() if mesh is None else mesh)()


def make_state(family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """A jitted function without arguments. The state is made where it lies: no device, and no host, ever holds more than its part."""
    key = rng.root(cfg.seed)

    def make() -> TrainState:
        params = weights.init(family.param_specs(cfg.model), rng.fold_in_name(key, "params"))
        return start_from(family, cfg, optimizer, params, fresh_buffers(family, cfg))

    return jax.jit(make, out_shardings=state_shardings(family, cfg, optimizer, mesh))


def fresh_buffers(family: ModelFamily, cfg: RunConfig) -> Any:
    return weights.init(family.buffer_specs(cfg.model), rng.fold_in_name(rng.root(cfg.seed), "buffers"))


def start_from(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, params: Any, buffers: Any
) -> TrainState:
    """Step 0 with given weights: a fresh run, an imported model, or the base of adapters."""
    base = None
    if cfg.lora.rank:
        base, params = params, weights.init(trainable_specs(family, cfg), rng.fold_in_name(rng.root(cfg.seed), "adapters"))
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
        bad_run=jnp.zeros((), jnp.int32),
    )


def begin_from(
    family: ModelFamily,
    cfg: RunConfig,
    optimizer: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    buffers: Any = None,
    **kept: Any,
) -> TrainState:
    """Step 0 with weights that lie on the mesh already, and are given away; all the rest is made where it lies. Buffers are fresh
    where none are given; `kept` are other fields of the state (opt_state, ema) to take over where they are not None."""
    given = {name: value for name, value in kept.items() if value is not None}

    def start(params: Any, buffers: Any, given: dict[str, Any]) -> TrainState:
        buffers = fresh_buffers(family, cfg) if buffers is None else buffers
        return replace(start_from(family, cfg, optimizer, params, buffers), **given)

    begin = jax.jit(start, out_shardings=state_shardings(family, cfg, optimizer, mesh), donate_argnums=(0, 1, 2))
    return begin(params, buffers, given)


def abstract_state(
    family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """Shapes, types and places only: what a checkpoint is restored into, and what a program is compiled for."""
    mesh = sharding.make_mesh() if mesh is None else mesh
    return jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        _shapes(family, cfg, optimizer),
        state_shardings(family, cfg, optimizer, mesh),
    )


def _shapes(family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation) -> TrainState:
    def make() -> TrainState:
        params = weights.init(family.param_specs(cfg.model), rng.root(0))
        return start_from(family, cfg, optimizer, params, fresh_buffers(family, cfg))

    return jax.eval_shape(make)


def state_shardings(family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where every leaf lies: weights, their averages and what the optimiser keeps of them by the family's rules, the carry with its
    rows, single numbers everywhere."""
    shapes, rules = _shapes(family, cfg, optimizer), family.RULES
    everywhere = jax.tree.map(lambda _: sharding.replicated(mesh), shapes)
    specs = trainable_specs(family, cfg)
    params = sharding.shardings(specs, mesh, rules)
    carry = None
    if shapes.carry is not None:
        names = family.carry_axes(shapes.carry)
        carry = sharding.named_shardings(shapes.carry, names, mesh, rules)
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
    """An optimiser's leaf that is named as a weight lies as the weight does; where it lacks one of the weight's axes (a mean over
    it), as the others do."""
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


def both_weights(state: TrainState) -> TrainState:
    """A state (or abstract state) reduced to what is evaluated: parameters, moving average, codebooks and the base of adapters."""
    return replace(state, step=None, carry=None, opt_state=None, key=None, skipped=None, bad_run=None)


def served_weights(state: TrainState) -> TrainState:
    """A state (or abstract state) reduced to what `model_weights` needs: one set of weights, and the codebooks."""
    state = both_weights(state)
    return state if state.ema is None else replace(state, params=None)


def model_weights(state: TrainState) -> tuple[Any, Any]:
    """What is evaluated, sampled and exported: the moving average where there is one; adapters merged into their base."""
    params = state.params if state.ema is None else state.ema
    return weights_of(params, state.base), state.buffers
