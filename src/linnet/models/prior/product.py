"""Matrix product for training, with gradients in the operand order of the fastest CPU kernels.

Letters: T rows, D inputs, E outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def product(x: Float[Array, "*B D"], weights: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Return `x @ weights` in the dtype of `x`."""
    return (_rows(x) @ weights.astype(x.dtype)).reshape(*x.shape[:-1], -1)


def _forward(x: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(x, weights), (x, weights)


def _backward(kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weights = kept
    d_out = _rows(d_out)
    # Transposed in memory: the barrier keeps XLA from folding the transpose into the product. Contracting the first axis of both
    # operands uses a kernel that is half as fast if the rows of `d_out` are a multiple of 4096 bytes long.
    across = jax.lax.optimization_barrier(_rows(x).T)
    d_weights = jnp.matmul(across, d_out, preferred_element_type=jnp.float32)
    d_x = jnp.einsum("te,de->td", d_out, weights.astype(x.dtype)).reshape(x.shape)
    return d_x, d_weights.astype(weights.dtype)


product.defvjp(_forward, _backward)


def _rows(x: Float[Array, "*B D"]) -> Float[Array, "T D"]:
    return x.reshape(-1, x.shape[-1])
