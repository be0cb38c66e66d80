"""Weight-only quantization: weights stored as int8 with scales, or as bfloat16, and used in matmuls in that form.

A `Quantized` matrix corresponds to `QuantizedWeight8bit` of Grok-1's release. Its input rows form G equal groups; each group has
one scale per output column. Letters: K inputs, N outputs, G groups.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int8, UInt16

from linnet.core.dtypes import WEIGHT_DTYPES, WeightDtype
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import pytree

T = TypeVar("T")
LARGEST = 127  # -128 is not used: the range is the same on both sides


@pytree
class Quantized:
    weight: Int8[Array, "*L K N"]
    scales: BFloat16[Array, "*L G N"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def n_group(self) -> int:
        return self.scales.shape[-2]


@pytree
class Bf16Bits:
    """A bfloat16 array stored as uint16 bits. XLA on CPU converts a complete bfloat16 array to float32 even where only a slice is
    read; of a uint16 array it reads only the slice."""

    bits: UInt16[Array, "*L K N"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


Weight = Array | Quantized | Bf16Bits


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def quantize(matrix: Float[Array, "*L K N"], n_group: int = 1) -> Quantized:
    """Quantize symmetrically to 255 levels, with one absmax scale per group and output column."""
    *lead, n_in, n_out = matrix.shape
    assert n_in % n_group == 0, f"{n_in} rows do not fall into {n_group} equal groups"
    grouped = matrix.astype(jnp.float32).reshape(*lead, n_group, n_in // n_group, n_out)
    # The scales are rounded to bfloat16 before the division, so that the int8 weights compensate for the rounding.
    scales = (jnp.max(jnp.abs(grouped), axis=-2) / LARGEST).astype(jnp.bfloat16)
    step = scales.astype(jnp.float32)[..., None, :]
    steps = jnp.round(grouped / jnp.where(step > 0, step, 1.0))
    weight = jnp.clip(steps, -LARGEST, LARGEST).astype(jnp.int8)
    return Quantized(weight=weight.reshape(matrix.shape), scales=scales)


def dequantize(matrix: Quantized, dtype: Any = jnp.float32) -> Float[Array, "*L K N"]:
    *lead, n_in, n_out = matrix.shape
    grouped = matrix.weight.reshape(*lead, matrix.n_group, n_in // matrix.n_group, n_out)
    return (grouped.astype(dtype) * matrix.scales.astype(dtype)[..., None, :]).reshape(matrix.shape)


def as_bits(matrix: BFloat16[Array, "*L K N"]) -> Bf16Bits:
    return Bf16Bits(bits=jax.lax.bitcast_convert_type(matrix, jnp.uint16))


def bfloat16_as_bits(weights: T) -> T:
    """Return the weights with bfloat16 arrays stored as bits, which can be read in tiles."""

    def one(leaf: Any) -> Any:
        is_half = not isinstance(leaf, Quantized) and leaf.dtype == jnp.bfloat16
        return as_bits(jnp.asarray(leaf)) if is_half else leaf

    return jax.tree.map(one, weights, is_leaf=is_quantized)


def to_array(matrix: Weight, dtype: Any) -> Float[Array, ...]:
    """Convert to an ordinary array of `dtype`."""
    if isinstance(matrix, Quantized):
        return dequantize(matrix, dtype)
    if isinstance(matrix, Bf16Bits):
        return jax.lax.bitcast_convert_type(matrix.bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)
    return matrix.astype(dtype)


def matmul(x: Float[Array, "*B K"], matrix: Weight) -> Float[Array, "*B N"]:
    """Multiply in the dtype of `x`. The scales are applied to the product, so that no dequantized copy of the weight is made."""
    if not isinstance(matrix, Quantized):
        return x @ to_array(matrix, x.dtype)
    scales = matrix.scales.astype(x.dtype)
    if matrix.n_group == 1:
        return (x @ matrix.weight.astype(x.dtype)) * scales[0]
    weight = matrix.weight.reshape(matrix.n_group, -1, matrix.shape[-1]).astype(x.dtype)
    grouped = x.reshape(*x.shape[:-1], matrix.n_group, -1)
    return jnp.einsum("...gn,gn->...n", jnp.einsum("...gk,gkn->...gn", grouped, weight), scales)


def concat_outputs(*matrices: Weight) -> Weight:
    """Concatenate matrices of the same kind and input size along the output axis."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-1), *matrices)


def cast_params(params: Any, specs: Any, weights: WeightDtype) -> Any:
    """Cast each weight to the requested dtype, or to the lowest precision that its spec allows."""
    return jax.tree.map(lambda spec, leaf: _lowered(leaf, spec, weights), specs, params, is_leaf=is_spec)


def storage_dtype(spec: Spec, weights: WeightDtype) -> WeightDtype:
    """Return the requested dtype, or the lowest precision that the spec allows if that is higher."""
    return WEIGHT_DTYPES[min(WEIGHT_DTYPES.index(weights), WEIGHT_DTYPES.index(spec.min_dtype))]


def _lowered(leaf: Weight, spec: Spec, weights: WeightDtype) -> Weight:
    kind = storage_dtype(spec, weights)
    if not isinstance(leaf, jax.Array | np.ndarray) or kind == "float32":
        return leaf
    return quantize(leaf) if kind == "int8" else leaf.astype(jnp.bfloat16)
