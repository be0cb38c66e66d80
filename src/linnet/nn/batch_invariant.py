"""Matrix products whose rows do not know of each other: a row's bits are the same alone and beside any number of others.

XLA's kernels for one row and for many add up in different orders. These shapes make them agree: short sums, full groups of rows, no
odd columns. Programs that use them are compiled with `COMPILER_OPTIONS`. Letters: B rows, C inputs, E outputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.core import quant
from linnet.core.quant import Bf16Bits, Quantized, Weight

SHORT_SUM = 256  # longest sum inside one matmul: longer ones are split, differently for one row and for many
ROWS = 12  # more than one row is padded to a multiple of this: Eigen takes rows by 6 or 4, and the last few another way
LANES = 64  # columns are padded to a multiple of this: the last few would be added up another way
# XLA's newer matmul kernels split sums by rules of their own, different for one row and for many.
COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

SplitK = tuple[Weight, ...]  # a matrix cut along its sum


def split_k(matrix: Weight) -> SplitK:
    """Float or 8 bits; a piece of the latter never spans two groups of scales."""
    short = -matrix.shape[-1] % LANES
    assert not isinstance(matrix, Bf16Bits)
    if not isinstance(matrix, Quantized):
        padded = jnp.pad(matrix, [(0, 0), (0, short)])
        return tuple(padded[start : start + SHORT_SUM] for start in range(0, padded.shape[0], SHORT_SUM))
    weight, scales = (jnp.pad(x, [(0, 0), (0, short)]) for x in (matrix.weight, matrix.scales))
    size = weight.shape[0] // matrix.n_group
    return tuple(
        Quantized(weight=weight[start : min(start + SHORT_SUM, end)], scales=scales[group : group + 1])
        for group, end in enumerate(range(size, weight.shape[0] + 1, size))
        for start in range(end - size, end, SHORT_SUM)
    )


def matmul(x: Float[Array, "B C"], pieces: SplitK) -> Float[Array, "B E"]:
    """`x` times the matrix, its columns padded as `cut` left them."""
    n_row = x.shape[0]
    if n_row > 1:
        x = jnp.pad(x, [(0, -n_row % ROWS), (0, 0)])
    start, y = 0, None
    for piece in pieces:
        part = quant.matmul(x[:, start : start + piece.shape[0]], piece)
        y = part if y is None else y + part
        start += piece.shape[0]
    assert y is not None
    return y[:n_row]
