"""Matrix product with hand-written gradients, for float, bfloat16 and quantised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.core import quant
from linnet.core.quant import Bf16Bits, Quantized, Weight
from linnet.parallel import sharding


def linear(x: Float[Array, "*B D"], weights: Weight) -> Float[Array, "*B E"]:
    """Return `x @ weights` in the dtype of `x`. Quantised weights have no gradient."""
    if isinstance(weights, Quantized | Bf16Bits):
        return quant.matmul(rows(x), weights).reshape(*x.shape[:-1], -1)
    return _linear(x, weights)


@jax.custom_vjp
def _linear(x: Float[Array, "*B D"], weights: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Float case, with a custom VJP: autodiff would compute the transposed weight gradient and transpose it back, for which XLA copies
    the wide cotangent and runs at half speed on the CPU."""
    return jnp.einsum("...d,de->...e", rows(x), weights.astype(x.dtype)).reshape(*x.shape[:-1], -1)


def _forward(x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return _linear(x, weights), (x, weights)


def _backward(kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weights = kept
    d_weights = jnp.einsum("...d,...e->de", rows(x), rows(d_out), preferred_element_type=jnp.float32)
    d_x = jnp.einsum("...e,de->...d", rows(d_out), weights.astype(x.dtype)).reshape(x.shape)
    return d_x, d_weights.astype(weights.dtype)


_linear.defvjp(_forward, _backward)


def rows(x: Float[Array, "*B D"]) -> Float[Array, "*T D"]:
    """Flatten the leading axes. On a mesh they are kept: flattening axes of which an inner one is sharded would move every row."""
    return x if sharding.current() is not None else x.reshape(-1, x.shape[-1])
