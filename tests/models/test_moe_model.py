"""The `moe` model: experts where chosen equal all experts in every gradient, and its parts are what they are defined to be."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_moe import make, tokens_of

from linnet.core.pytree import named_leaves
from linnet.models.moe import model
from linnet.models.moe.config import MoEConfig
from linnet.nn.gqa import SoftCap, capped
from linnet.nn.moe import activation
from linnet.nn.norm import rms_norm_gain
from linnet.nn.positions import apply_rope


@partial(jax.jit, static_argnames=("cfg", "plain"))
def gradient(params: Any, tokens: Any, targets: Any, cfg: MoEConfig, plain: bool) -> Any:
    def loss(params: Any) -> Any:
        x, aux = model.forward(params, tokens, cfg, plain=plain)
        return jnp.mean(model.nats(params, x, targets, cfg)) + 0.01 * jnp.mean(aux.routing.logits**2)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize(
    ("changes", "n_row", "length"),
    [
        pytest.param({"n_expert": 3, "n_choice": 1, "n_q_head": 6}, 2, 13, marks=pytest.mark.trial),
        ({"n_expert": 5, "n_choice": 3, "n_kv_head": 4}, 1, 37),
        pytest.param({"remat": "full"}, 3, 150, marks=pytest.mark.trial),
    ],
    ids=str,
)
def test_full_gradient_equals_that_of_the_plain_version(changes: dict[str, Any], n_row: int, length: int) -> None:
    cfg, params = make(**changes)
    tokens = tokens_of(n_row, length)
    tokens[-1, length // 2] = cfg.pad_id
    targets = tokens_of(n_row, length, seed=8)
    (want, d_want), (got, d_got) = (gradient(params, tokens, targets, cfg, plain) for plain in (True, False))
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for (name, a), (_, b) in zip(named_leaves(d_got), named_leaves(d_want), strict=True):
        largest = float(np.abs(b).max())
        assert largest > 0, f"{name} has a gradient"
        np.testing.assert_allclose(a, b, atol=1e-5 * max(largest, 1e-3), err_msg=name)


def test_padding_is_ignored() -> None:
    """A text after padding differs from the text alone by its positions only, and turning is relative: the logits are the same."""
    cfg, params = make()
    tokens = tokens_of(1, 12)
    after = np.concatenate([np.full((1, 5), cfg.pad_id, np.int32), tokens], axis=1)
    run = jax.jit(lambda t: model.logits(params, model.forward(params, t, cfg)[0], cfg))
    np.testing.assert_allclose(np.asarray(run(after))[:, 5:], run(tokens), atol=2e-5)


def test_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, gain = np.random.default_rng(0).normal(0, 3, (4, 6)), np.arange(1.0, 7.0)
    want = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(
        rms_norm_gain(jnp.asarray(x, jnp.float32), jnp.asarray(gain, jnp.float32)), want, rtol=2e-6
    )
    tiny = rms_norm_gain(jnp.full((1, 6), 1e-4, jnp.bfloat16), jnp.ones(6))  # float32 inside: 1e-8 beside 1e-5
    np.testing.assert_allclose(np.asarray(tiny, np.float32), 1e-4 / np.sqrt(1e-8 + 1e-5), rtol=1e-2)
    assert tiny.dtype == jnp.bfloat16


def test_positions_turn_pairs_of_the_two_halves() -> None:
    width, random = 8, np.random.default_rng(0)
    x, position = random.normal(size=(2, 5, 3, width)), random.integers(0, 8192, (2, 5))
    angle = position[..., None, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * np.exp(1j * angle)
    want = np.concatenate([pairs.real, pairs.imag], axis=-1)
    # An angle of 8192 radians is known to about 5e-4 in float32.
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x, jnp.float32), jnp.asarray(position), 10_000.0), want, atol=3e-3
    )
    near = apply_rope(jnp.asarray(x, jnp.float32), jnp.asarray(position % 8), 10_000.0)
    angle = angle * 0 + (position % 8)[..., None, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * np.exp(1j * angle)
    np.testing.assert_allclose(near, np.concatenate([pairs.real, pairs.imag], axis=-1), atol=1e-5)


def test_far_positions_turn_alike_in_and_out_of_a_program() -> None:
    """A last bit of the frequency is five ten-thousandths of a turn at position 8191: the compiler must not choose it."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 9, 2, 128)), jnp.float32)
    position = 8183 + jnp.arange(9)[None]
    inside = jax.jit(lambda x, at: apply_rope(x, at, 10_000.0))(x, position)
    np.testing.assert_allclose(inside, apply_rope(x, position, 10_000.0), atol=2e-6)


def test_activation_is_the_tanh_form_of_gelu_times_the_value() -> None:
    gate, value = np.linspace(-6, 6, 49), np.linspace(3, -1, 49)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    want = 0.5 * gate * (1 + np.tanh(inner)) * value
    np.testing.assert_allclose(activation(*(jnp.asarray(x, jnp.float32) for x in (gate, value))), want, atol=2e-6)


def test_attention_scores_are_scaled_then_soft_capped() -> None:
    raw = np.linspace(-400, 400, 41)
    want = 30 * np.tanh(raw * 0.25 / 30)
    np.testing.assert_allclose(capped(jnp.asarray(raw, jnp.float32), SoftCap(scale=0.25, cap=30.0)), want, atol=1e-5)
    assert np.abs(want).max() < 30
