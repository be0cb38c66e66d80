"""Weights in eight bits: near what they were, multiplied without a scaled copy, and only where a spec allows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.core import quant
from linnet.core.params import Spec
from linnet.core.pytree import n_bytes
from linnet.core.quant import Quantized
from linnet.nn import batch_invariant
from linnet.nn.linear import linear


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@settings(max_examples=20, deadline=None)
@given(groups=st.sampled_from([1, 2, 8]), seed=st.integers(0, 99), scale=st.floats(1e-6, 1e6))
def test_quantized_weight_is_within_half_a_step(groups: int, seed: int, scale: float) -> None:
    matrix = np.asarray(drawn(3, 16, 5, seed=seed)) * np.float32(scale)
    held = quant.quantize(jnp.asarray(matrix), groups)
    assert held.weight.dtype == jnp.int8
    assert held.scales.dtype == jnp.bfloat16
    assert held.scales.shape == (3, groups, 5)
    step = np.repeat(np.asarray(held.scales, np.float32), 16 // groups, axis=1)
    # The largest value of a group may lie beyond 127 steps, by the rounding of its scale to eight bits.
    assert (np.abs(np.asarray(quant.dequantize(held)) - matrix) <= 0.5 * step + 127 * step * 2**-8).all()


def test_zero_columns_stay_zero_and_what_is_on_the_grid_is_exact() -> None:
    grid = np.random.default_rng(0).integers(-127, 128, (8, 3)).astype(np.float32)
    grid[0] = 127.0  # the largest of every column: the step is one
    grid[:, 1] = 0.0
    np.testing.assert_array_equal(quant.dequantize(quant.quantize(jnp.asarray(grid))), grid)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_product_is_that_of_the_dequantized_weight(groups: int) -> None:
    held, x = quant.quantize(drawn(32, 20), groups), drawn(2, 3, 32, seed=1)
    want = x @ quant.dequantize(held)
    np.testing.assert_allclose(quant.matmul(x, held), want, atol=1e-5)
    np.testing.assert_allclose(linear(x, held), want, atol=1e-5)
    np.testing.assert_allclose(batch_invariant.matmul(x[0], batch_invariant.split_k(held))[:, :20], want[0], atol=1e-5)


@pytest.mark.parametrize("groups", [1, 4])
def test_long_sum_is_cut_inside_its_groups(groups: int) -> None:
    held, x = quant.quantize(drawn(4 * 300, 70), groups), drawn(5, 1200, seed=1)
    pieces = batch_invariant.split_k(held)
    assert all(piece.shape[0] <= batch_invariant.SHORT_SUM for piece in pieces)
    assert sum(piece.shape[0] for piece in pieces) == 1200
    want = np.asarray(x, np.float64) @ np.asarray(quant.dequantize(held), np.float64)
    np.testing.assert_allclose(np.asarray(batch_invariant.matmul(x, pieces))[:, :70], want, rtol=1e-5, atol=1e-4)


def test_side_by_side_is_concatenation() -> None:
    a, b = quant.quantize(drawn(8, 3)), quant.quantize(drawn(8, 5, seed=1))
    joined = quant.concat_outputs(a, b)
    want = np.concatenate([quant.dequantize(a), quant.dequantize(b)], axis=1)
    assert isinstance(joined, Quantized)
    np.testing.assert_array_equal(quant.dequantize(joined), want)


def test_weight_is_stored_in_at_least_the_min_dtype_of_its_spec() -> None:
    specs = {
        "norm": Spec((4,), (None,), "ones"),
        "embed": Spec((6, 4), (None, None), min_dtype="bfloat16"),
        "product": Spec((4, 4), (None, None), min_dtype="int8"),
    }
    params = {name: drawn(*spec.shape) for name, spec in specs.items()}
    full, half, eight = (quant.cast_params(params, specs, kind) for kind in ("float32", "bfloat16", "int8"))
    assert full["product"] is params["product"]
    assert [half[name].dtype for name in specs] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert eight["norm"].dtype == jnp.float32
    assert eight["embed"].dtype == jnp.bfloat16
    assert isinstance(eight["product"], Quantized)
    assert n_bytes(eight) == 4 * 4 + 6 * 4 * 2 + 4 * 4 + 4 * 2
