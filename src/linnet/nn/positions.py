"""Position encodings: sinusoids and rotary embeddings (RoPE).

The references round their frequencies differently, so each has a function of its own; how a frequency becomes an encoding is shared.
Letters: P positions, T tokens, H heads, K width of a head, R rotated values.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


def sinusoid(position: Int[Array, "*P"], width: int, longest: float) -> Float[Array, "*P {width}"]:
    """Return `[sin(p f_0), .., cos(p f_0), ..]` with `f_i = longest ** (-2 i / width)`."""
    frequency = longest ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return sin_cos(position, frequency)


def sin_cos(position: Shaped[Array, "*P"], frequency: Float[Array | np.ndarray, " F"]) -> Float[Array, "*P F2"]:
    """Return the sines of `position * frequency`, then the cosines."""
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


def interleaved_rope_frequencies(width: int, base: float = 10_000.0) -> Float[np.ndarray, " R2"]:
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(max(width, 1))
    return (np.float32(1) / np.float32(base) ** exponent).astype(np.float32)


def interleaved_rope_tables(
    first: int, n: int, width: int
) -> tuple[Float[np.ndarray, "N R"], Float[np.ndarray, "N R"]]:
    """Return cosines and sines of `n` positions from `first` on. Each angle occurs twice, for a pair of adjacent values."""
    angle = np.arange(first, first + n, dtype=np.float32)[:, None] * interleaved_rope_frequencies(width)
    angle = np.repeat(angle, 2, axis=-1)
    return np.cos(angle), np.sin(angle)


def apply_interleaved_rope(
    x: Float[Array, "*B N K"], cos: Float[Array | np.ndarray, "*P N R"], sin: Float[Array | np.ndarray, "*P N R"]
) -> Float[Array, "*B N K"]:
    """Rotate adjacent pairs of the first R values; `apply_rope` rotates value i with value i + K / 2. The others are unchanged."""
    width = cos.shape[-1]
    turned = x[..., :width].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    across = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(turned.shape)
    return jnp.concatenate([(turned * cos + across * sin).astype(x.dtype), x[..., width:]], axis=-1)
