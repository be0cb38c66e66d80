"""Decoding a `moe` model equals the forward pass, and a slot's results are its own: bit for bit beside any neighbours."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_moe import make, tokens_of

from linnet.core import rng
from linnet.core.dtypes import WeightDtype
from linnet.models.moe import cache, model, slots
from linnet.models.moe.cache import BLOCK, MoEState
from linnet.models.moe.config import MoEConfig
from linnet.nn.sampling import sampling_settings


@partial(jax.jit, static_argnames="cfg")
def forward_logits(params: Any, tokens: Any, cfg: MoEConfig) -> jax.Array:
    return model.logits(params, model.forward(params, tokens, cfg)[0], cfg)


def run(params: Any, state: slots.MoESlots, tokens: np.ndarray, cfg: MoEConfig, active: Any = None) -> Any:
    """Teacher-forced: B x T tokens, one tick each; the state after, and logits T B A."""
    on = jnp.asarray(np.ones(len(tokens), bool) if active is None else active)
    logits = []
    for token in tokens.T:
        state, scores = slots.tick(params, state, jnp.asarray(token), cfg, on)
        logits.append(np.asarray(scores))
    return state, np.stack(logits)


def assert_same(a: MoEState, b: MoEState) -> None:
    assert a.n_read == b.n_read
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.trial),
        {"weights": "bfloat16", "n_expert": 5, "n_choice": 3, "n_q_head": 6, "d_k": 6, "score_cap": 2.0},
        pytest.param(
            {"weights": "int8", "n_expert": 1, "n_choice": 1, "n_q_head": 1, "n_kv_head": 1, "n_layer": 1},
            marks=pytest.mark.trial,
        ),
    ],
    ids=str,
)
def test_decode_equals_forward(changes: dict[str, Any]) -> None:
    """From nothing, over the end of a block, and after a prompt of a length that fits nothing, in a slot beside others."""
    cfg, params = make(**changes)
    tokens = tokens_of(3, BLOCK + 20)
    want = np.asarray(forward_logits(params, tokens, cfg))
    close = partial(np.testing.assert_allclose, atol=2e-5 * float(np.abs(want).max()))
    state, got = run(params, slots.init_slots(cfg, 3), tokens, cfg)
    close(got.swapaxes(0, 1), want)
    state = slots.insert(state, slots.DECODER.prefill(params, None, tokens[1, :37].tolist(), cfg), 0)
    fed = np.stack([tokens[1, 37:], tokens[0, 37:], tokens[2, 37:]])
    _, got = run(params, state, fed, cfg, [True, False, True])
    close(got[:, 0], want[1, 37:])


def test_bfloat16_is_close_to_forward() -> None:
    """All experts are chosen: none can be chosen otherwise by a rounding."""
    cfg, params = make(dtype="bfloat16", n_expert=2)
    tokens = tokens_of(2, 40)
    want = np.asarray(forward_logits(params, tokens, cfg))
    _, got = run(params, slots.init_slots(cfg, 2), tokens, cfg)
    assert np.abs(got.swapaxes(0, 1) - want).max() < 0.04 * np.abs(want).max()


@pytest.mark.parametrize("weights", [pytest.param("float32", marks=pytest.mark.trial), "int8"])
def test_reading_in_chunks_equals_reading_at_once(weights: WeightDtype) -> None:
    """Cut anywhere, within a block and at its end, the memory and what is said about each token stay the same."""
    cfg, params = make(weights)
    tokens = tokens_of(1, 200)
    whole = slots.DECODER.prefill(params, None, tokens[0].tolist(), cfg)
    want = np.asarray(jax.nn.log_softmax(forward_logits(params, tokens, cfg)))[0]
    for splits in ([1, 128, 199], [64, 127, 129]):
        memory, parts = slots.empty_state(cfg), np.split(tokens[0], splits)
        for part in parts:
            memory = slots.prefill_chunk(params, None, memory, part.tolist(), cfg)
        assert memory.n_read == whole.n_read
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), memory, whole)
    start, end = slots.DECODER.prefill(params, None, tokens[0, :70].tolist(), cfg), 70 + slots.chunk_len(cfg)
    chunk, targets = jnp.asarray(tokens[:, 70:end]), tokens[:, 71 : end + 1]
    output, top = slots.chunk_logprobs(params, None, start, chunk, jnp.asarray(targets), cfg=cfg, n_top=3)
    np.testing.assert_allclose(output, np.take_along_axis(want[70:end], targets[0][:, None], -1)[:, 0], atol=5e-5)
    assert top is not None
    np.testing.assert_allclose(top[1][:, 0], want[70:end].max(axis=-1), atol=5e-5)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    "changes",
    [{"weights": "int8"}, pytest.param({"weights": "bfloat16", "dtype": "bfloat16"}, marks=pytest.mark.trial)],
    ids=str,
)
def test_slot_is_batch_invariant(changes: dict[str, Any]) -> None:
    """Admitted late, into a slot that held another sequence, alone or among many, with idle neighbours and busy ones. Wide enough
    that a product could be cut in several ways."""
    cfg, params = make(**{"d_model": 256, "d_k": 16, "n_vocab": 259, "widening": 4.0, **changes})
    more, others = tokens_of(8, 6, 259), tokens_of(8, 6, 259, seed=9)
    one = slots.DECODER.prefill(params, None, tokens_of(1, 125, 259)[0].tolist(), cfg)
    state, alone = run(params, slots.insert(slots.init_slots(cfg, 1), one, 0), more[:1], cfg)
    after = slots.extract(params, state, 0, cfg, 131)
    for n_slot, place, idle in ((8, 0, ()), (8, 7, (1,)), (8, 5, (0, 1, 2, 3, 4, 6, 7)), (3, 1, (0,))):
        state, _ = run(params, slots.init_slots(cfg, n_slot), others[:n_slot], cfg)  # the others are older
        state = slots.insert(state, one, place)
        fed = others[:n_slot].copy()
        fed[place] = more[0]
        active = np.asarray([i not in idle for i in range(n_slot)])
        state, got = run(params, state, fed, cfg, active)
        np.testing.assert_array_equal(got[:, place], alone[:, 0], f"slot {place} of {n_slot}")
        assert_same(slots.extract(params, state, place, cfg, 131), after)
        np.testing.assert_array_equal(state.position, np.where(np.arange(n_slot) == place, 131, 6 + 6 * active))


def test_neighbours_that_choose_the_same_experts_change_no_bit() -> None:
    """All slots read the same text, so each expert has many rows."""
    cfg, params = make("int8", d_model=256, d_k=16, n_vocab=259, widening=4.0)
    tokens = tokens_of(1, 9, 259)
    _, alone = run(params, slots.init_slots(cfg, 1), tokens, cfg)
    _, among = run(params, slots.init_slots(cfg, 8), np.repeat(tokens, 8, axis=0), cfg)
    for i in range(8):
        np.testing.assert_array_equal(among[:, i], alone[:, 0])


def test_idle_slot_does_not_change() -> None:
    cfg, params = make()
    tokens = tokens_of(3, 10)
    state, _ = run(params, slots.init_slots(cfg, 3), tokens, cfg)
    before = slots.extract(params, state, 1, cfg, 10)
    state, _ = run(params, state, tokens, cfg, [True, False, True])
    assert state.position.tolist() == [20, 10, 20]
    assert_same(slots.extract(params, state, 1, cfg, 10), before)


def test_extract_and_insert_round_trip() -> None:
    cfg, params = make()
    tokens = tokens_of(3, BLOCK + 12)
    state, _ = run(params, slots.init_slots(cfg, 3), tokens[:, : BLOCK + 2], cfg)
    taken = [slots.extract(params, state, i, cfg, BLOCK + 2) for i in range(3)]
    kept, want = run(params, state, tokens[:, BLOCK + 2 :], cfg)
    state = slots.init_slots(cfg, 3)
    for i in (2, 0, 1):
        state = slots.insert(state, taken[i], i)
    state, got = run(params, state, tokens[:, BLOCK + 2 :], cfg)
    np.testing.assert_array_equal(got, want)
    for i in range(3):
        again = slots.extract(params, state, i, cfg, BLOCK + 12, taken[i])
        assert again.blocks[0] is taken[i].blocks[0], "a full block is shared, not copied"
        assert_same(again, slots.extract(params, kept, i, cfg, BLOCK + 12))


def test_extracted_state_contains_nothing_of_an_earlier_request() -> None:
    """Neither its keys nor its tokens; and they change no bit of what the next occupant reads."""
    cfg, params = make()
    long, short = tokens_of(1, 150), tokens_of(1, 20, seed=9)
    one = slots.DECODER.prefill(params, None, short[0].tolist(), cfg)
    used, _ = run(params, slots.init_slots(cfg, 1), long, cfg)
    used = slots.insert(used, one, 0)
    fresh = slots.insert(slots.init_slots(cfg, 1), one, 0)
    used, got = run(params, used, long[:, :115], cfg)  # continues into the block that only the earlier one had filled
    fresh, want = run(params, fresh, long[:, :115], cfg)
    np.testing.assert_array_equal(got, want)
    taken = slots.extract(params, used, 0, cfg, 135)
    assert_same(taken, slots.extract(params, fresh, 0, cfg, 135))
    for part in (taken.blocks[1].keys, taken.blocks[1].values):
        assert np.abs(np.asarray(part)[:, :, :7]).min(axis=(0, 1, 3)).all()
        np.testing.assert_array_equal(np.asarray(part)[:, :, 7:], 0)
    np.testing.assert_array_equal(taken.blocks[1].tokens[7:], 0)
    # A prompt is read through a whole chunk: its padding must leave nothing either.
    jax.tree.map(
        lambda part: np.testing.assert_array_equal(part[..., 20:, :] if part.ndim > 1 else part[20:], 0), one.blocks[0]
    )


@pytest.mark.slow
def test_decode_samples_the_same_tokens_for_any_dispatch_and_any_neighbours() -> None:
    cfg, params = make("int8")

    def drawn(n_slot: int, place: int, splits: list[int], idle: bool = False) -> list[np.ndarray]:
        settings = sampling_settings(n_slot, temperature=1.2, top_p=0.95, repetition_penalty=1.1)
        keys = jnp.stack([rng.root(3 if i == place else 100 + i) for i in range(n_slot)])
        state, seen = slots.init_slots(cfg, n_slot), jnp.zeros((n_slot, cfg.n_vocab), jnp.int32)
        memory = slots.DECODER.prefill(params, None, tokens_of(1, 20)[0].tolist(), cfg)
        state = slots.insert(state, memory, place)
        token, out, logprobs = jnp.full((n_slot,), 5, jnp.int32), [], []
        active = jnp.arange(n_slot) == place if idle else None
        for n in splits:
            state, seen, tokens, probs, _ = slots.decode(
                params, state, token, settings, keys, seen, active=active, cfg=cfg, n_ticks=n
            )
            token = tokens[-1]
            out.append(np.asarray(tokens)[:, place])
            logprobs.append(np.asarray(probs)[:, place])
        taken = slots.extract(params, state, place, cfg, 20 + sum(splits))
        return [np.concatenate(out), np.concatenate(logprobs), *jax.tree.leaves(taken)]

    want = drawn(1, 0, [8])
    for other in (drawn(1, 0, [4, 4]), drawn(3, 1, [4, 4]), drawn(3, 1, [8], idle=True)):
        for a, b in zip(other, want, strict=True):
            np.testing.assert_array_equal(a, b)


def decode_program(cfg: MoEConfig, params: Any, n: int) -> str:
    state = slots.init_slots(cfg, n)
    keys = jnp.stack([rng.root(i) for i in range(n)])
    seen, token = jnp.zeros((n, cfg.n_vocab), jnp.int32), jnp.ones((n,), jnp.int32)
    jitted: Any = slots.decode
    lowered = jitted.lower(params, state, token, sampling_settings(n), keys, seen, cfg=cfg, n_ticks=4)
    return lowered.compile().as_text() or ""


def of_shape(program: str, dtype: str, *shape: int) -> list[str]:
    """The lines that make an array of this shape."""
    whole = f"{dtype}[{','.join(map(str, shape))}]"
    return [line for line in program.splitlines() if f"= {whole}" in line or f"= ({whole}" in line]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.trial), 3])
def test_updates_are_in_place(n: int) -> None:
    """A copy of the whole cache at every tick would cost more than the tick."""
    cfg, params = make(n_kv_head=2, d_k=8)
    program = decode_program(cfg, params, n)
    lines = of_shape(program, "f32", cfg.n_layer, n, cfg.n_kv_head, cache.capacity(cfg), cfg.d_k)
    assert lines, "the cache is in the program under its own shape"
    assert [line for line in lines if " copy(" in line or " copy-start(" in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_no_float_copy_of_the_experts_is_made(weights: WeightDtype) -> None:
    """Sizes that occur once, so that a shape tells what an array is."""
    cfg, params = make(weights, n_layer=2, n_expert=5, d_model=24, widening=3.0)
    assert (cfg.d_ffn, cfg.n_expert) == (48, 5)
    program = decode_program(cfg, params, 2)
    held = {"int8": "s8", "bfloat16": "u16"}[weights]
    e, d, f = cfg.n_expert, cfg.d_model, cfg.d_ffn
    assert of_shape(program, held, 2 * e, d, f), "the experts are in the program as they are held"
    for lead in ((2, e), (2 * e,), (e,)):
        for dtype in ("f32", "bf16", "f16"):
            assert of_shape(program, dtype, *lead, d, f) == []
            assert of_shape(program, dtype, *lead, f, d) == []
    # The same search finds the experts of a model that does hold them as floats.
    cfg, params = make("float32", n_layer=2, n_expert=5, d_model=24, widening=3.0)
    assert of_shape(decode_program(cfg, params, 2), "f32", 2 * e, d, f)
