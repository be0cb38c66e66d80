"""A conditioned model: decoding equals training, rows are their own, and training shows embeddings a little off."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.core import params as weights
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.core.pytree import replace
from linnet.data import Batch
from linnet.models.base import Keys
from linnet.models.generate import generate
from linnet.models.vq import family, guided, model, slots
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import to_reference
from linnet.models.vq.decode import read_token
from linnet.nn.sampling import sampling_settings

WIDTH = 6
CFG = VQConfig(
    d_model=16,
    d_k=8,
    d_v=16,
    n_head=2,
    n_code=6,
    n_layer=1,
    block_len=8,
    mem_len=8,
    pe_abs=True,
    d_condition=WIDTH,
    n_place=40,
    p_drop_condition=0.0,
)
KEY = rng.root(3)
PARAMS, BUFFERS = weights.init(family.param_specs(CFG), KEY), weights.init(family.buffer_specs(CFG), KEY)
PARAMS = replace(
    PARAMS, place=jax.random.normal(KEY, (40, 16))
)  # as training leaves it: each place reads in its own way


def embeds_of(n: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((n, WIDTH)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


EMBEDS = embeds_of(3)
TOKENS = np.random.default_rng(1).integers(3, 259, (3, 41)).astype(np.int32)
BATCH = Batch(
    inputs=TOKENS[:, :-1],
    targets=TOKENS[:, 1:],
    doc_ids=np.zeros((3, 40), np.int32),
    loss_mask=np.ones((3, 40), np.float32),
    condition=EMBEDS,
)


@jax.jit
def forward(tokens: Any, embeds: Any) -> jax.Array:
    carry = model.conditioned(PARAMS, model.empty_carry(CFG, len(tokens)), embeds, CFG)
    return model.logits(PARAMS, model.forward(PARAMS, BUFFERS, tokens, carry, CFG)[0], CFG)


@jax.jit
def ticks(prepared: Any, state: slots.VQSlots, tokens: Any) -> tuple[slots.VQSlots, jax.Array]:
    return jax.lax.scan(lambda s, t: read_token(prepared, s, t, None, CFG), state, tokens.T)


@pytest.mark.slow
def test_decoding_equals_training_far_beyond_the_window_and_after_a_prompt() -> None:
    want = np.asarray(forward(BATCH.inputs, EMBEDS))
    prepared = slots.prepare(PARAMS, BUFFERS, CFG)
    state = slots.init_slots(CFG, 4)
    for i, embed in enumerate(EMBEDS):
        state = slots.insert(state, slots.conditioned_state(PARAMS, embed, CFG), i)
    fed = np.concatenate([BATCH.inputs, BATCH.inputs[:1]])
    state, got = ticks(prepared, state, fed)
    np.testing.assert_allclose(np.asarray(got).swapaxes(0, 1)[:3], want, atol=2e-5)
    # The last slot reads what the first does, and has no condition.
    untold = np.asarray(forward(BATCH.inputs[:1], np.zeros((1, WIDTH), np.float32)))
    np.testing.assert_allclose(np.asarray(got)[:, 3], untold[0], atol=2e-5)
    assert np.abs(untold - want[0]).max(axis=-1).min() > 1e-3, "every position is conditioned"
    # A prompt; and a slot that is emptied, taken out and put elsewhere.
    one = slots.DECODER.prefill(
        PARAMS, BUFFERS, BATCH.inputs[1, :19].tolist(), CFG, slots.conditioned_state(PARAMS, EMBEDS[1], CFG)
    )
    state = slots.insert(slots.clear(state, 1), one, 3)
    state = slots.insert(state, slots.extract(prepared, state, 3, CFG), 0)
    _, got = ticks(prepared, state, np.repeat(BATCH.inputs[1:2, 19:], 4, axis=0))
    for place in (0, 3):
        np.testing.assert_allclose(np.asarray(got)[:, place], want[1, 19:], atol=2e-5)
    assert not np.asarray(slots.clear(state, 0).condition)[0].any()


def drawn(
    embeds: np.ndarray | None, seeds: list[int], decoder: Any = slots.DECODER, prompt: tuple[int, ...] = ()
) -> Any:
    n = len(seeds)
    states = None if embeds is None else [decoder.conditioned_state(PARAMS, embed, CFG) for embed in embeds]
    stream = generate(
        decoder,
        PARAMS,
        BUFFERS,
        CFG,
        [prompt] * n,
        max_tokens=24,
        settings=sampling_settings(n),
        seeds=seeds,
        ignore_end=True,
        states=states,
        n_ticks=8,
    )
    pieces = [[piece for piece in row if piece is not None] for row in zip(*stream, strict=True)]
    return [([t for p in row for t in p.tokens], [x for p in row for x in p.logprobs]) for row in pieces]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("decoder", "prompt"),
    [
        pytest.param(slots.DECODER, (), id="plain", marks=pytest.mark.slow),
        pytest.param(guided.CFGDecoder(2.5), (5, 9, 200), id="guided after a prompt"),
    ],
)
def test_row_is_bit_identical_beside_rows_with_other_conditions(decoder: Any, prompt: tuple[int, ...]) -> None:
    together = drawn(EMBEDS, [1, 2, 3], decoder, prompt)
    assert together[1:2] == drawn(EMBEDS[1:2], [2], decoder, prompt)
    assert together[1:2] != drawn(EMBEDS[2:], [2], decoder, prompt), "the embedding makes no difference"


@pytest.mark.slow
def test_guidance_extrapolates_from_unconditional_to_conditional() -> None:
    reported, untold = drawn(EMBEDS, [1, 2, 3]), drawn(None, [1, 2, 3])
    assert drawn(EMBEDS, [1, 2, 3], guided.CFGDecoder(1.0)) == reported
    none_at_all = drawn(EMBEDS, [1, 2, 3], guided.CFGDecoder(0.0))
    assert [row[0] for row in none_at_all] == [row[0] for row in untold]
    tokens, logprobs = drawn(EMBEDS[:1], [4], guided.CFGDecoder(3.0))[0]
    read = np.array([[CFG.end_id, *tokens[:-1]]], np.int32)
    far, near = (forward(read, e)[0] for e in (np.zeros((1, WIDTH), np.float32), EMBEDS[:1]))
    want = jax.nn.log_softmax(far + 3.0 * (near - far))[jnp.arange(len(tokens)), jnp.asarray(tokens)]
    np.testing.assert_allclose(logprobs, want, atol=1e-4)


def keys(update: int, sequence: int) -> Keys:
    return Keys(update=rng.fold_in(rng.root(1), update), sequence=rng.fold_in(rng.root(2), sequence))


def shown(embeds: np.ndarray, keys: Keys, first_row: int = 0, **changes: Any) -> np.ndarray:
    """As training shows them."""
    cfg = dataclasses.replace(CFG, **changes)
    return np.asarray(family.augment_condition(jnp.asarray(embeds), family._dropout(keys, first_row, len(embeds)), cfg))


def test_row_is_augmented_by_its_own_key_per_sequence_and_keeps_its_norm() -> None:
    how: dict[str, Any] = {"condition_noise": 0.5, "p_drop_condition": 0.3}
    many = np.concatenate([embeds_of(60, seed=5), np.zeros((4, WIDTH), np.float32)])
    full = shown(many, keys(0, 0), **how)
    np.testing.assert_array_equal(full, shown(many, keys(1, 0), **how))
    np.testing.assert_array_equal(full[32:], shown(many[32:], keys(0, 0), 32, **how))
    assert (full != shown(many, keys(0, 1), **how)).any()
    length = np.linalg.norm(full, axis=1)
    kept = length > 0
    assert 8 < 60 - kept.sum() < 32
    assert not kept[60:].any(), "a row without an embedding stays one"
    np.testing.assert_allclose(length[kept], 1, atol=1e-5)
    assert 0.8 < (full * many).sum(1)[kept].mean() < 0.97


def test_conditions_train_and_dropped_rows_train_as_unconditional() -> None:
    def loss(params: Any, batch: Batch, keys: Keys | None, cfg: VQConfig) -> Any:
        return family.loss(params, BUFFERS, family.FAMILY.empty_carry(cfg, 3), batch, keys, 0, cfg)[0]

    reported = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None, CFG)))
    value, gradient = reported(PARAMS, BATCH)
    assert np.abs(np.asarray(gradient.w_condition)).max() > 0
    untold, _ = reported(PARAMS, replace(BATCH, condition=np.zeros_like(EMBEDS)))
    never = dataclasses.replace(CFG, p_drop_condition=1.0)
    dropped = jax.jit(lambda batch: loss(PARAMS, batch, keys(0, 0), never))(BATCH)
    np.testing.assert_allclose(dropped, untold, rtol=1e-6)
    assert abs(float(value - untold)) > 1e-3


def test_unconditional_model_is_unchanged() -> None:
    plain = dataclasses.replace(CFG, d_condition=0, n_place=0)
    assert family.param_specs(plain).w_condition is family.param_specs(plain).place is None
    assert family.FAMILY.empty_carry(plain, 2).condition is None
    assert slots.init_slots(plain, 2).condition is None


def test_evaluation_in_segments_equals_evaluation_at_once() -> None:
    nats = jax.jit(lambda carry, batch: family.nats(PARAMS, BUFFERS, carry, batch, CFG))
    scores = jax.nn.log_softmax(forward(BATCH.inputs, EMBEDS))
    want = -jnp.take_along_axis(scores, jnp.asarray(BATCH.targets)[..., None], -1)[..., 0]
    carry, parts = family.FAMILY.empty_carry(CFG, 3), []
    for start in range(0, 40, 8):
        values, carry = nats(carry, BATCH.slice(start, start + 8))
        parts.append(values)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), want, atol=1e-4)


def test_conditions_and_experts_have_no_place_in_the_reference() -> None:
    for cfg, words in ((CFG, "model.d_condition"), (VQConfig(n_expert=4), "model.n_expert")):
        with pytest.raises(UserError, match=words):
            to_reference(PARAMS, BUFFERS, cfg)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_condition": -1}, "model.d_condition"),
        ({"n_place": 0}, "model.n_place"),
        ({"d_condition": 0}, "model.n_place"),
        ({"p_drop_condition": 1.5}, "model.p_drop_condition"),
        ({"condition_noise": -0.1}, "model.condition_noise"),
    ],
)
def test_invalid_settings_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataclasses.replace(CFG, **changes)
