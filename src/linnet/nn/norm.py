"""Norms: root mean square, layer norm and L2, the first two in float32 for any activation dtype."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6
GAIN_EPSILON = 1e-5  # the value used by Grok-1, and by the layer norms of DALL-E 2's prior
SMALLEST_LENGTH = 1e-12


def rms_norm(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    return _rms(x.astype(jnp.float32), EPSILON).astype(x.dtype)


def rms_norm_affine(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], bias: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    return (_rms(x.astype(jnp.float32), EPSILON) * gain + bias).astype(x.dtype)


def rms_norm_gain(x: Float[Array, "*B D"], gain: Float[Array, " D"]) -> Float[Array, "*B D"]:
    return (_rms(x.astype(jnp.float32), GAIN_EPSILON) * gain).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], kind: Literal["plain", "maximum"] = "plain"
) -> Float[Array, "*B D"]:
    """Layer norm without a bias. `maximum` first divides by the row's largest value, without a gradient. This is not the largest
    magnitude: as in the reference, a row of negative values changes its sign, and a row of zeros becomes NaN."""
    wide = x.astype(jnp.float32)
    if kind == "maximum":
        wide = wide / jax.lax.stop_gradient(jnp.max(wide, axis=-1, keepdims=True))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (_rms(wide, GAIN_EPSILON) * gain).astype(x.dtype)


def _rms(wide: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)


def l2_normalize(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Scale rows to norm 1. A zero row stays zero and has a zero gradient."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    tiny = square < SMALLEST_LENGTH**2
    length = jnp.sqrt(jnp.where(tiny, 1.0, square))
    return x / jnp.where(tiny, SMALLEST_LENGTH, length)
