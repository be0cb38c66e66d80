"""From gradients to updates: clip, one of four rules, learning rate and schedule, and decay that they scale only if asked to.

Layers are stacked on a leading axis; rules that look at a whole matrix see each layer by itself, as if nothing were stacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from linnet.config.schema import OptimConfig
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import named_leaves

FINAL = 0.1  # where cosine and linear end, as a share of the top
MUON_RMS = 0.2  # the size of Adam's usual update, so that one learning rate suits both of Muon's halves
LION_B1, LION_B2 = 0.95, 0.98

Schedule = Callable[[ArrayLike], Float[Array, "*N"]]


def schedule(cfg: OptimConfig) -> Schedule:
    """The learning rate's multiplier at a step (from 0): up from 0 to 1, down until `cfg.steps`, then held. The dampened ones are
    the reference prior's: never at 0 at first, and a cosine that comes back up after its end."""
    if cfg.schedule.startswith("dampened"):
        return _dampened(cfg)
    warmup, span = cfg.warmup_steps, cfg.steps - cfg.warmup_steps

    def multiplier(step: ArrayLike) -> Float[Array, "*N"]:
        now = jnp.minimum(jnp.asarray(step, jnp.float32), cfg.steps)
        share = jnp.maximum(now - warmup, 0.0) / span
        if cfg.schedule == "cosine":
            after = FINAL + (1.0 - FINAL) * 0.5 * (1.0 + jnp.cos(jnp.pi * share))
        elif cfg.schedule == "linear":
            after = 1.0 - (1.0 - FINAL) * share
        elif cfg.schedule == "inv_sqrt":
            after = jnp.sqrt(max(warmup, 1) / jnp.maximum(now, max(warmup, 1)))
        else:
            after = jnp.ones_like(now)
        return jnp.where(now < warmup, now / max(warmup, 1), after)

    return multiplier


def _dampened(cfg: OptimConfig) -> Schedule:
    def multiplier(step: ArrayLike) -> Float[Array, "*N"]:
        now = jnp.asarray(step, jnp.float32)
        held = jnp.minimum(1.0, (now + 1) / cfg.warmup_steps) if cfg.warmup_steps else jnp.ones_like(now)
        return held * 0.5 * (1 + jnp.cos(jnp.pi * now / cfg.steps)) if cfg.schedule == "dampened_cosine" else held

    return multiplier


def optimizer(cfg: OptimConfig, specs: Any) -> optax.GradientTransformation:
    """`specs` is the tree of the parameters' Specs. The state is arrays only, the update a pure function."""
    multiplier = schedule(cfg)
    parts = [
        optax.identity() if cfg.clip is None else optax.clip_by_global_norm(cfg.clip),
        _rule(cfg, specs),
        optax.scale_by_schedule(lambda step: -cfg.lr * multiplier(step)),
    ]
    # Before the schedule an update still points up the gradient, hence the sign.
    decay = _decay(-cfg.decay if cfg.decay_by_lr else cfg.decay, specs, vectors=cfg.decay_vectors)
    parts.insert(2 if cfg.decay_by_lr else 3, decay)
    return optax.chain(*parts)


def _rule(cfg: OptimConfig, specs: Any) -> optax.GradientTransformation:
    if cfg.name == "adamw":
        return _adam(cfg)
    if cfg.name == "lion":
        stored = jnp.bfloat16 if cfg.momentum_dtype == "bfloat16" else None
        return optax.scale_by_lion(b1=LION_B1, b2=LION_B2, mu_dtype=stored)
    if cfg.name == "adafactor":
        return _grouped(specs, lambda spec: _Group("all", spec.stack_shape), {"all": _adafactor()})
    return _grouped(specs, _muon_group, {"matrices": _muon(), "rest": _adam(cfg)})


def _muon_group(spec: Spec) -> _Group:
    """Embeddings and output weights are rows looked up, not maps between layers: Adam suits them better."""
    if len(spec.layer_shape) == 2 and "vocab" not in spec.axes:
        return _Group("matrices", spec.stack_shape)
    return _Group("rest", ())


def _adam(cfg: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)


def _adafactor() -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())


def _muon() -> optax.GradientTransformation:
    def plain(matrices: Any) -> Any:
        """Nothing is reshaped: rows and columns are what they seem."""
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), matrices)

    def scale(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda update: MUON_RMS * max(update.shape) ** 0.5 * update, updates)

    return optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=plain), optax.stateless(scale))


def _decay(decay: float, specs: Any, *, vectors: bool) -> optax.GradientTransformation:
    """Subtracts `decay` times the parameter; from a vector (within its layer) only with `vectors`."""

    def subtract(update: Array, param: Array, spec: Spec) -> Array:
        return update if len(spec.layer_shape) == 1 and not vectors else update - decay * param

    return optax.stateless(lambda updates, params: jax.tree.map(subtract, updates, params, specs) if decay else updates)


class _Group(NamedTuple):
    """Parameters that one rule updates together: `stack` layers (and experts) each, or none when they are seen as they are."""

    rule: str
    stack: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.rule}_in_{'x'.join(map(str, self.stack))}_layers" if self.stack else self.rule


def _grouped(
    specs: Any, group_of: Callable[[Spec], _Group], rules: dict[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Each group of parameters by its own rule; groups of stacked layers under vmap."""
    groups = {name: group_of(spec) for name, spec in named_leaves(specs, is_spec)}
    transforms = {
        group.name: functools.reduce(lambda rule, _: _each_layer(rule), group.stack, rules[group.rule])
        for group in groups.values()
    }

    def split(tree: Any) -> dict[str, dict[str, Array]]:
        parts: dict[str, dict[str, Array]] = {name: {} for name in transforms}
        for name, leaf in named_leaves(tree):
            parts[groups[name].name][name] = leaf
        return parts

    def init(params: Any) -> dict[str, Any]:
        return {name: transforms[name].init(part) for name, part in split(params).items()}

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        gradients, weights = split(updates), split(params)
        done: dict[str, tuple[Any, Any]] = {
            name: t.update(gradients[name], state[name], weights[name]) for name, t in transforms.items()
        }
        leaves = {name: leaf for part, _ in done.values() for name, leaf in part.items()}
        structure = jax.tree.structure(updates)
        merged = jax.tree.unflatten(structure, [leaves[name] for name, _ in named_leaves(updates)])
        return merged, {name: after for name, (_, after) in done.items()}

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _each_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.vmap(lambda u, s, p: rule.update(u, s, p))(updates, state, params)

    return optax.GradientTransformation(jax.vmap(rule.init), update)
