"""Optimizers: gradient clipping, one of four update rules, learning-rate schedule, and weight decay (scaled by lr if `decay_by_lr`).

Layers are stacked on a leading axis; rules that depend on a complete matrix (Adafactor, Muon) are applied to each layer separately.
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

FINAL = 0.1  # final value of cosine and linear, relative to the peak
MUON_RMS = 0.2  # typical RMS of Adam's updates, so that one learning rate suits Muon and Adam parameters
LION_B1, LION_B2 = 0.95, 0.98

Schedule = Callable[[ArrayLike], Float[Array, "*N"]]


def schedule(cfg: OptimConfig) -> Schedule:
    """Return the learning-rate multiplier as a function of the step (from 0).

    It warms up from 0 to 1, decays until `cfg.steps`, and is constant after that. The dampened schedules are the reference prior's:
    their warm-up starts above 0, and the cosine rises again after `cfg.steps`.
    """
    if cfg.schedule.startswith("dampened"):
        return _dampened(cfg)
    warmup, span = cfg.warmup_steps, cfg.steps - cfg.warmup_steps

    def multiplier(step: ArrayLike) -> Float[Array, "*N"]:
        now = jnp.minimum(jnp.asarray(step, jnp.float32), cfg.steps)
        progress = jnp.maximum(now - warmup, 0.0) / span
        if cfg.schedule == "cosine":
            after = FINAL + (1.0 - FINAL) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif cfg.schedule == "linear":
            after = 1.0 - (1.0 - FINAL) * progress
        elif cfg.schedule == "inv_sqrt":
            after = jnp.sqrt(max(warmup, 1) / jnp.maximum(now, max(warmup, 1)))
        else:
            after = jnp.ones_like(now)
        return jnp.where(now < warmup, now / max(warmup, 1), after)

    return multiplier


def _dampened(cfg: OptimConfig) -> Schedule:
    def multiplier(step: ArrayLike) -> Float[Array, "*N"]:
        now = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (now + 1) / cfg.warmup_steps) if cfg.warmup_steps else jnp.ones_like(now)
        return warm * 0.5 * (1 + jnp.cos(jnp.pi * now / cfg.steps)) if cfg.schedule == "dampened_cosine" else warm

    return multiplier


def optimizer(cfg: OptimConfig, specs: Any) -> optax.GradientTransformation:
    """Return the optimizer for parameters with these Specs. Its state contains only arrays, and its update is pure."""
    multiplier = schedule(cfg)
    parts = [
        optax.identity() if cfg.clip is None else optax.clip_by_global_norm(cfg.clip),
        _rule(cfg, specs),
        optax.scale_by_schedule(lambda step: -cfg.lr * multiplier(step)),
    ]
    # Before the schedule the update still has the sign of the gradient, so the decay is negated there.
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
    """Return the group of a parameter: matrices use Muon, the rest Adam.

    Embeddings and output weights use Adam too: they are lookup tables rather than maps between layers.
    """
    if len(spec.layer_shape) == 2 and "vocab" not in spec.axes:
        return _Group("matrices", spec.stack_shape)
    return _Group("rest", ())


def _adam(cfg: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)


def _adafactor() -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())


def _muon() -> optax.GradientTransformation:
    def plain(matrices: Any) -> Any:
        """Use each matrix without reshaping."""
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), matrices)

    def scale(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda update: MUON_RMS * max(update.shape) ** 0.5 * update, updates)

    return optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=plain), optax.stateless(scale))


def _decay(decay: float, specs: Any, *, vectors: bool) -> optax.GradientTransformation:
    """Subtract `decay` times the parameter; for vectors (within a layer) only if `vectors` is set."""

    def subtract(update: Array, param: Array, spec: Spec) -> Array:
        return update if len(spec.layer_shape) == 1 and not vectors else update - decay * param

    return optax.stateless(lambda updates, params: jax.tree.map(subtract, updates, params, specs) if decay else updates)


class _Group(NamedTuple):
    """Parameters that one rule updates together. `stack`: their stacked leading axes (layers, experts) to vmap over, or ()."""

    rule: str
    stack: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.rule}_in_{'x'.join(map(str, self.stack))}_layers" if self.stack else self.rule


def _grouped(
    specs: Any, group_of: Callable[[Spec], _Group], rules: dict[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Update each group of parameters with its own rule, with vmap over stacked layers."""
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
