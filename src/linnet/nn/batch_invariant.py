"""Batch-invariant matmul: each row's result is bit-identical for any batch size.

XLA's kernels for one row and for many rows accumulate in different orders. These shapes make them agree: short sums, full groups of
rows, no leftover columns. Programs that use them are compiled with `COMPILER_OPTIONS`. Letters: B rows, C inputs, E outputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.core import quant
from linnet.core.quant import Bf16Bits, Quantized, Weight

SHORT_SUM = 256  # longest sum inside one matmul: XLA splits longer sums, differently for one row and for many
ROWS = 12  # batches of more than one row are padded to a multiple of this: Eigen takes 6 or 4 rows at a time, the rest differently
LANES = 64  # columns are padded to a multiple of this: leftover columns would be accumulated in another order
# XLA's newer matmul kernels split sums by rules that differ between one row and many.
COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

SplitK = tuple[Weight, ...]  # a matrix split along its contracting dimension


def split_k(matrix: Weight) -> SplitK:
    """Split a float or 8-bit matrix along its inputs. A piece of an 8-bit matrix never spans two scale groups."""
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
    """Multiply `x` by the matrix; the output keeps the column padding added by `split_k`."""
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
