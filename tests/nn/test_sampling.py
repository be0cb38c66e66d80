"""Sampling: each setting does what it says, and a row is the same bits in every batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.core import rng
from linnet.core.errors import UserError
from linnet.nn import sampling
from linnet.nn.sampling import sampling_settings


def _logits(n_row: int, n_token: int = 259, seed: int = 0) -> jax.Array:
    return 3.0 * jax.random.normal(jax.random.key(seed), (n_row, n_token))


def _join(rows: list[sampling.SamplingSettings]) -> sampling.SamplingSettings:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *rows)


MIXED = _join(
    [
        sampling_settings(1),
        sampling_settings(1, temperature=0.0, top_p=0.3),
        sampling_settings(1, temperature=0.7, top_p=0.9),
        sampling_settings(1, top_k=5),
        sampling_settings(1, min_p=0.2, repetition_penalty=1.3),
        sampling_settings(1, temperature=2.0, top_k=40, top_p=0.8, min_p=0.01),
    ]
)


def test_row_is_bit_identical_in_every_batch() -> None:
    logits = _logits(6)
    seen = (jax.random.uniform(jax.random.key(3), logits.shape) < 0.3).astype(jnp.int32)
    keys = jnp.stack([rng.root(i) for i in range(6)])
    chance = sampling.uniforms(keys, jnp.arange(6))
    draw = jax.jit(sampling.sample)
    tokens, logprobs = draw(logits, MIXED, chance, seen)
    for rows in ([0], [1], [2], [3], [4], [5], [2, 4, 1], [5, 3, 0]):
        at = jnp.array(rows)
        one_tokens, one_logprobs = draw(
            logits[at], jax.tree.map(lambda x, at=at: x[at], MIXED), sampling.uniforms(keys[at], at), seen[at]
        )
        np.testing.assert_array_equal(one_tokens, tokens[at])
        np.testing.assert_array_equal(one_logprobs, logprobs[at])


def test_greedy_takes_the_first_of_equals_whatever_else_is_set() -> None:
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0]])
    tokens, logprobs = sampling.sample(
        logits, sampling_settings(1, temperature=0.0, top_p=0.1, top_k=1), jnp.array([0.99])
    )
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[:, 1], rtol=1e-6)


def test_draws_follow_the_distribution() -> None:
    n = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (n, 4))
    chance = jax.random.uniform(jax.random.key(1), (n,))

    def shares(**kwargs: float) -> np.ndarray:
        tokens, _ = jax.jit(sampling.sample)(logits, sampling_settings(n, **kwargs), chance)  # pyright: ignore
        return np.bincount(np.asarray(tokens), minlength=4) / n

    np.testing.assert_allclose(shares(), [0.5, 0.3, 0.15, 0.05], atol=0.015)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], atol=0.015)
    np.testing.assert_allclose(shares(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.015)
    np.testing.assert_allclose(shares(min_p=0.25), [0.5263, 0.3158, 0.1579, 0], atol=0.015)
    squared = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), squared / squared.sum(), atol=0.015)
    assert shares(top_k=2)[2:].sum() == shares(top_p=0.6)[2:].sum() == shares(min_p=0.25)[3] == 0


def test_top_p_works_on_what_top_k_leaves() -> None:
    scores = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    keep = sampling.allowed(scores, sampling_settings(1, top_k=2, top_p=0.5))
    assert keep.tolist() == [[True, False, False, False]]  # 0.4 of 0.7 is more than half


nucleus_mask, softmax = jax.jit(sampling.nucleus_mask), jax.jit(jax.nn.softmax)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 50]), st.floats(0.01, 1.0), st.booleans())
def test_nucleus_equals_the_obvious_one(seed: int, size: int, p: float, ties: bool) -> None:
    rng_ = np.random.default_rng(seed)
    logits = rng_.integers(0, 3, size).astype(np.float32) if ties else rng_.normal(0, 2, size).astype(np.float32)
    probability = np.asarray(softmax(jnp.asarray(logits))).astype(np.float64)
    order = np.argsort(probability, kind="stable")
    tail = np.cumsum(probability[order])
    got = np.asarray(nucleus_mask(jnp.asarray(logits)[None], jnp.asarray([p], jnp.float32)))[0][order]
    sure = np.abs(tail - (1.0 - (p - sampling.NUCLEUS_SLACK))) > 1e-6  # beyond rounding
    want = tail > 1.0 - (p - sampling.NUCLEUS_SLACK)
    want[-1] = True
    np.testing.assert_array_equal(got[sure], want[sure])
    assert got[-1]


def test_repetition_penalty_pushes_seen_tokens_down() -> None:
    logits, seen = jnp.array([[2.0, -2.0, 1.0]]), jnp.array([[3, 1, 0]])
    np.testing.assert_allclose(
        sampling.penalise(logits, sampling_settings(1, repetition_penalty=2.0), seen), [[1.0, -4.0, 1.0]]
    )


def test_randomness_is_the_rows_key_and_position() -> None:
    keys = jnp.stack([rng.root(1), rng.root(1), rng.root(2)])
    a = sampling.uniforms(keys, jnp.array([4, 5, 4]))
    assert len(set(a.tolist())) == 3
    assert sampling.uniforms(keys[1:2], jnp.array([4]))[0] == a[0]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-7},
        {"temperature": 1e-45},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 0.009},
    ],
)
def test_bad_settings_are_rejected(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        sampling_settings(1, **bad)  # pyright: ignore


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 1000),
    top_p=st.sampled_from([0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_filters_together_leave_at_least_one(
    seed: int, top_p: float, typical_p: float, top_k: int, min_p: float
) -> None:
    logits = _logits(3, 40, seed)
    requested = sampling_settings(3, top_p=top_p, typical_p=typical_p, top_k=top_k, min_p=min_p)
    assert np.asarray(sampling.allowed(logits, requested)).any(axis=-1).all()


def test_typical_keeps_what_is_nearest_to_the_mean_surprise() -> None:
    p = np.array([[0.4, 0.3, 0.2, 0.1]])
    surprise = -np.log(p)
    nearest = np.argsort(np.abs(surprise - (p * surprise).sum()))[0]
    for share in (0.1, 0.35, 0.6, 0.95):
        kept = np.flatnonzero(np.asarray(sampling.typical_mask(jnp.log(jnp.array(p)), jnp.array([share])))[0])
        n = int(np.searchsorted(np.cumsum(p[0, nearest]), share) + 1)
        assert set(kept) == set(nearest[:n])


def test_rules_forbid_and_delay() -> None:
    logits = jnp.zeros((2, 4))
    rules = sampling.LogitMask(
        bias=jnp.array([[0.0, -jnp.inf, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]]),
        min_token_mask=jnp.array([[False, False, False, False], [False, False, True, False]]),
        min_token_until=jnp.array([0, 7]),
        in_prompt=jnp.zeros((2, 4), bool),
    )
    seen = jnp.zeros((2, 4), jnp.int32)
    greedy = sampling_settings(2, temperature=0.0)
    chance = jnp.zeros((2,))
    assert sampling.sample(logits, greedy, chance, seen, rules, jnp.array([6, 6]))[0].tolist() == [0, 0]
    assert sampling.sample(logits, greedy, chance, seen, rules, jnp.array([7, 7]))[0].tolist() == [0, 2]
    taken = sampling.penalise(
        jnp.ones((1, 3)),
        sampling_settings(1, presence_penalty=0.5, frequency_penalty=0.25),
        jnp.array([[0, 1, 3]]),
    )
    np.testing.assert_allclose(taken, [[1.0, 0.25, -0.25]])
