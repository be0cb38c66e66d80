"""Position encodings: sinusoids and rotary embeddings (RoPE)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def sinusoid(position: Int[Array, "*P"], width: int, longest: float) -> Float[Array, "*P {width}"]:
    """Return `[sin(p f_0), .., cos(p f_0), ..]` with `f_i = longest ** (-2 i / width)`."""
    frequency = longest ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def apply_rope(x: Float[Array, "*B T H K"], position: Int[Array, "*B T"], base: float) -> Float[Array, "*B T H K"]:
    """Rotate queries or keys by their positions, computed in float32 for any dtype of `x`."""
    width = x.shape[-1]
    # In NumPy, rounded as in the release: XLA may round the last bit differently, which is an angle error of 5e-4 at position 8191.
    frequency = np.float32(1) / np.float32(base ** (np.arange(0, width, 2) / width))
    phase = (position[..., None] * frequency)[..., None, :]  # *B T 1 K/2
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
