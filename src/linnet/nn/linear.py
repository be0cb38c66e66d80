"""Matrix product with hand-written gradients, for float, bfloat16, quantised and split (`batch_invariant`) weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.core import quant
from linnet.core.quant import Bf16Bits, Quantized, Weight
from linnet.nn import batch_invariant
from linnet.nn.batch_invariant import SplitK
from linnet.parallel import sharding


def linear(
    x: Float[Array, "*B D"], weights: Weight | SplitK, *, transpose_inputs: bool = False
) -> Float[Array, "*B E"]:
    """Return `x @ weights` in the dtype of `x`. Only float weights have a gradient. With split weights the output keeps their column
    padding. `transpose_inputs` chooses the kernel of the weight gradient, see `_backward`; it changes rounding and speed only."""
    if isinstance(weights, tuple):
        return batch_invariant.matmul(_flatten(x), weights).reshape(*x.shape[:-1], -1)
    if isinstance(weights, Quantized | Bf16Bits):
        return quant.matmul(rows(x), weights).reshape(*x.shape[:-1], -1)
    return _linear(x, weights, transpose_inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: Float[Array, "*B D"], weights: Float[Array, "D E"], transpose_inputs: bool) -> Float[Array, "*B E"]:
    """Float case, with a custom VJP: autodiff would compute the transposed weight gradient and transpose it back, for which XLA copies
    the wide cotangent and runs at half speed on the CPU."""
    flat = _flatten(x) if transpose_inputs else rows(x)
    return jnp.einsum("...d,de->...e", flat, weights.astype(x.dtype)).reshape(*x.shape[:-1], -1)


def _forward(x: Array, weights: Array, transpose_inputs: bool) -> tuple[Array, tuple[Array, Array]]:
    return _linear(x, weights, transpose_inputs), (x, weights)


def _backward(transpose_inputs: bool, kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weights = kept
    if transpose_inputs:
        d_out = _flatten(d_out)
        # Transposed in memory: the barrier keeps XLA from folding the transpose into the product. Contracting the first axis of both
        # operands uses a kernel that is half as fast if the rows of `d_out` are a multiple of 4096 bytes long.
        across = jax.lax.optimization_barrier(_flatten(x).T)
        d_weights = jnp.matmul(across, d_out, preferred_element_type=jnp.float32)
    else:
        d_out = rows(d_out)
        d_weights = jnp.einsum("...d,...e->de", rows(x), d_out, preferred_element_type=jnp.float32)
    d_x = jnp.einsum("...e,de->...d", d_out, weights.astype(x.dtype)).reshape(x.shape)
    return d_x, d_weights.astype(weights.dtype)


_linear.defvjp(_forward, _backward)


def rows(x: Float[Array, "*B D"]) -> Float[Array, "*T D"]:
    """Flatten the leading axes. On a mesh they are kept: flattening axes of which an inner one is sharded would move every row."""
    return x if sharding.current() is not None else _flatten(x)


def _flatten(x: Float[Array, "*B D"]) -> Float[Array, "T D"]:
    return x.reshape(-1, x.shape[-1])
