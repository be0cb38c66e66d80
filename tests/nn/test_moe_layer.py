"""Experts computed only where chosen equal all of them computed, in value and every gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.core import quant
from linnet.nn import moe as ex
from linnet.nn.moe import ExpertWeights, Routing


def made(n_token: int, n_expert: int, n_choice: int, width: int = 16, hidden: int = 24, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    weights = ExpertWeights(
        gate=draw(n_expert, width, hidden), value=draw(n_expert, width, hidden), out=draw(n_expert, hidden, width)
    )
    x = jnp.asarray(random.normal(size=(n_token, width)), jnp.float32)
    return x, draw(width, n_expert) * 4, weights


@pytest.mark.parametrize(
    ("n_token", "n_expert", "n_choice"),
    [(1, 4, 2), (5, 8, 2), (64, 8, 2), (50, 3, 3), (33, 5, 1), (300, 2, 1), (7, 40, 4)],
)
def test_grouped_experts_equal_dense_ones_in_value_and_gradient(n_token: int, n_expert: int, n_choice: int) -> None:
    x, router, weights = made(n_token, n_expert, n_choice)
    target = jnp.asarray(np.random.default_rng(9).normal(size=x.shape), jnp.float32)

    def loss(how: Any, x: Any, router: Any, weights: Any) -> jax.Array:
        return jnp.sum(how(x, ex.route(x, router, n_choice), weights) * target)

    def both(how: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: loss(how, *a), argnums=(0, 1, 2)))(x, router, weights)

    want, got = both(ex.moe_dense), both(ex.moe_grouped)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    x, _, weights = made(70, 4, 1)
    chosen = jnp.full((70, 1), 2, jnp.int32)
    even = jnp.full((70, 4), 0.25)
    routing = Routing(logits=even, probability=even, chosen=chosen, weight=jnp.full((70, 1), 0.25))
    got = jax.jit(ex.moe_grouped)(x, routing, weights)
    np.testing.assert_allclose(got, ex.moe_dense(x, routing, weights), atol=1e-5)


def test_stack_of_layers_is_read_from_where_the_layer_begins() -> None:
    x, router, weights = made(20, 4, 2)
    _, _, others = made(20, 8, 2, seed=3)
    stack = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), others, weights)
    routing = ex.route(x, router, 2)
    got = jax.jit(lambda first: ex.moe_grouped(x, routing, stack, first=first))(8)
    np.testing.assert_allclose(got, ex.moe_grouped(x, routing, weights), atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_eight_bit_experts_equal_their_dequantized_selves(groups: int) -> None:
    x, router, weights = made(20, 4, 2)
    stored = jax.tree.map(lambda w: quant.quantize(w, groups), weights)
    plain = jax.tree.map(quant.dequantize, stored, is_leaf=quant.is_quantized)
    routing = ex.route(x, router, 2)
    np.testing.assert_allclose(
        jax.jit(ex.moe_grouped)(x, routing, stored), ex.moe_grouped(x, routing, plain), atol=1e-5
    )
    np.testing.assert_allclose(ex.moe_dense(x, routing, stored), ex.moe_dense(x, routing, plain), atol=1e-5)


def test_padding_tokens_cost_and_change_nothing() -> None:
    x, router, weights = made(40, 4, 2)
    routing = ex.route(x, router, 2)
    complete = ex.moe_grouped(x, routing, weights)
    some = jax.jit(lambda n: ex.moe_grouped(x, routing, weights, n_token=n))(17)
    np.testing.assert_allclose(some[:17], complete[:17], atol=1e-6)
    np.testing.assert_array_equal(some[17:], 0)


def test_balance_is_one_where_even_and_more_where_not() -> None:
    even = jnp.full((8, 4), 0.25)
    spread = Routing(logits=even, probability=even, chosen=jnp.arange(8)[:, None] % 4, weight=jnp.full((8, 1), 0.25))
    assert float(ex.balance_loss(spread, jnp.ones(8))) == pytest.approx(1.0)
    peaked = jax.nn.one_hot(jnp.zeros(8, jnp.int32), 4)
    crowd = Routing(logits=peaked, probability=peaked, chosen=jnp.zeros((8, 1), jnp.int32), weight=jnp.ones((8, 1)))
    assert float(ex.balance_loss(crowd, jnp.ones(8))) == pytest.approx(4.0)
    assert float(ex.z_loss(spread, jnp.ones(8))) == pytest.approx((np.log(4) + 0.25) ** 2, rel=1e-5)
    half = jnp.asarray([1.0] * 4 + [0.0] * 4)  # what is masked does not count
    assert float(ex.balance_loss(spread, half)) == pytest.approx(1.0)
