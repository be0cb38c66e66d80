"""Root-mean-square norms, computed in float32 for any activation dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-6
GAIN_EPSILON = 1e-5  # the value used by Grok-1


def rms_norm(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)


def rms_norm_affine(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], bias: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (wide * gain + bias).astype(x.dtype)


def rms_norm_gain(x: Float[Array, "*B D"], gain: Float[Array, " D"]) -> Float[Array, "*B D"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + GAIN_EPSILON)
    return (wide * gain).astype(x.dtype)
