"""Sinusoids: the vector of a distance or of a position."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sinusoid(position: Int[Array, "*P"], width: int, longest: float) -> Float[Array, "*P {width}"]:
    """`[sin(p f_0), .., cos(p f_0), ..]` with `f_i = longest ** (-2 i / width)`."""
    frequency = longest ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
