"""Exponential moving average (EMA) of the weights, with a constant decay or the growing decay of ema-pytorch.

With a growing decay, the step count before an update decides whether it copies or averages; the count after it sets the decay.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from linnet.config.schema import TrainConfig
from linnet.core.errors import invalid

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    beta: float = 0.9999
    """Maximum decay."""
    update_after_step: int = 100
    """Up to this step the EMA is a copy of the weights."""
    update_every: int = 10
    """Steps between updates of the EMA."""
    inv_gamma: float = 1.0
    power: float | None = 2 / 3
    """Exponent of the decay's growth. None: the decay is `beta` at every step."""
    min_value: float = 0.0
    """Minimum decay, once averaging has started."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_value <= self.beta <= 1:
            got = (self.min_value, self.beta)
            raise invalid("ema.min_value / ema.beta", got, "rising numbers between 0 and 1", "use 0 and 0.9999")
        if self.update_every < 1 or self.update_after_step < 0:
            got = (self.update_every, self.update_after_step)
            raise invalid("ema.update_every / ema.update_after_step", got, "at least 1 and 0", "use 10 and 100")
        if not self.inv_gamma > 0 or (self.power is not None and not self.power > 0):
            raise invalid("ema.inv_gamma / ema.power", (self.inv_gamma, self.power), "above 0", "use 1 and 2/3")


def settings(cfg: TrainConfig) -> EmaConfig | None:
    """Return the EMA settings of a run; None if it keeps no EMA."""
    if cfg.ema_decay is None:
        return None
    return EmaConfig(
        beta=cfg.ema_decay,
        update_after_step=cfg.ema_after,
        update_every=cfg.ema_every,
        inv_gamma=cfg.ema_inv_gamma,
        power=cfg.ema_power,
        min_value=cfg.ema_min,
    )


def decay(cfg: EmaConfig, step: ArrayLike) -> Float[Array, ""]:
    """Return the decay after `step` updates."""
    if cfg.power is None:
        return jnp.full((), cfg.beta, jnp.float32)
    age = jnp.maximum(jnp.asarray(step, jnp.float32) - cfg.update_after_step - 1, 0.0)
    grown = 1.0 - (1.0 + age / cfg.inv_gamma) ** -cfg.power
    return jnp.where(age > 0, jnp.clip(grown, cfg.min_value, cfg.beta), 0.0)


def update(cfg: EmaConfig, ema: T, params: T, step: ArrayLike) -> T:
    """Return the EMA after an update that `step` others preceded. With a decay of 0 it equals the weights, bit for bit."""
    if cfg.power is None:
        return jax.tree.map(lambda old, new: cfg.beta * old + (1 - cfg.beta) * new, ema, params)
    step = jnp.asarray(step, jnp.int32)
    due = step % cfg.update_every == 0
    # The first update after the copies also starts from the weights, hence a decay of 0.
    keep = jnp.where(step <= begins(cfg), 0.0, decay(cfg, step + 1))

    def one(old: Any, new: Any) -> Any:
        mixed = jnp.where(keep > 0, old + (new - old) * (1.0 - keep), new).astype(old.dtype)
        return jnp.where(due, mixed, old)

    return jax.tree.map(one, ema, params)


def begins(cfg: EmaConfig) -> int:
    """Return the first due step after `update_after_step`, at which the reference copies the weights once more."""
    return (cfg.update_after_step // cfg.update_every + 1) * cfg.update_every
