"""AdamW as torch has it, with the reference prior's settings: decay is scaled by the learning rate and spares vectors.

The rate rises over the warm-up while the cosine already falls, and the cosine comes back up after its end: so does the reference's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from linnet.errors import refuse
from linnet.params import Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    lr: float = 1.1e-4
    decay: float = 6.02e-2
    """Times the learning rate: what every update takes of each weight that is not a vector."""
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-6
    clip: float | None = 0.5
    """Largest global norm of the gradient; none: no clipping."""
    warmup_steps: int = 0
    cosine_steps: int | None = None
    """Half a wave of the learning rate; none: it stays."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise refuse("optim.lr", self.lr, "above 0", "use 1.1e-4")
        if self.decay < 0:
            raise refuse("optim.decay", self.decay, "0 or more", "use 0 for none")
        if self.warmup_steps < 0 or (self.cosine_steps is not None and self.cosine_steps < 1):
            got = (self.warmup_steps, self.cosine_steps)
            raise refuse("optim.warmup_steps / optim.cosine_steps", got, "0 or more, and 1 or more or none", "use 0")


def learning_rate(cfg: AdamWConfig) -> Callable[[ArrayLike], Float[Array, "*N"]]:
    """At an update, counted from 0."""

    def rate(step: ArrayLike) -> Float[Array, "*N"]:
        now = jnp.asarray(step, jnp.float32)
        high = jnp.minimum(1.0, (now + 1) / cfg.warmup_steps) if cfg.warmup_steps else jnp.ones_like(now)
        if cfg.cosine_steps is not None:
            high = high * 0.5 * (1 + jnp.cos(math.pi * now / cfg.cosine_steps))
        return cfg.lr * high

    return rate


def adamw(cfg: AdamWConfig, specs: Any) -> optax.GradientTransformation:
    rate = learning_rate(cfg)

    def decayed(updates: Any, params: Any) -> Any:
        def one(update: Array, param: Array, spec: Spec) -> Array:
            return update if len(spec.layer_shape) == 1 else update + cfg.decay * param

        return jax.tree.map(one, updates, params, specs) if cfg.decay else updates

    return optax.chain(
        optax.identity() if cfg.clip is None else optax.clip_by_global_norm(cfg.clip),
        optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps),
        optax.stateless(decayed),
        optax.scale_by_schedule(lambda step: -rate(step)),
    )
