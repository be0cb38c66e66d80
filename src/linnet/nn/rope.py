"""Rotary positions: pairs of values (one of each half) are turned by an angle that grows with the position."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(x: Float[Array, "*B T H K"], position: Int[Array, "*B T"], base: float) -> Float[Array, "*B T H K"]:
    """In float32, whatever the type of `x`."""
    width = x.shape[-1]
    frequency = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    phase = (position[..., None] * frequency)[..., None, :]  # *B T 1 K/2
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
