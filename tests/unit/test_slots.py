"""Decoding equals the forward pass, and a slot's results are its own: bit for bit beside any neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import params as weights
from linnet import rng
from linnet.families.vq import decode, model, slots
from linnet.families.vq.config import VQConfig
from linnet.families.vq.params import buffer_specs, param_specs
from linnet.nn.sampling import sampling_settings

Made = tuple[VQConfig, Any, Any, decode.Prepared]


def make(**changes: Any) -> Made:
    """A tiny model whose every weight counts."""
    sizes = {"n_vocab": 30, "d_model": 16, "d_k": 8, "d_v": 16, "n_code": 6, "n_layer": 1, "block_len": 8, "mem_len": 8}
    cfg = VQConfig(**{**sizes, **changes})
    key = jax.random.key(1)
    params, buffers = weights.init(param_specs(cfg), key), weights.init(buffer_specs(cfg), key)
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.fold_in(key, x.size), x.shape, x.dtype), params
    )
    return cfg, params, buffers, slots.prepare(params, buffers, cfg)


def tokens_of(n_row: int, length: int, n_vocab: int = 30) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (n_row, length), 0, n_vocab)


def forward_logits(made: Made, tokens: jax.Array) -> tuple[jax.Array, model.VQCarry]:
    cfg, params, buffers, _ = made
    documents = jnp.cumsum(tokens == 1, axis=1)
    start = model.empty_carry(cfg, tokens.shape[0])
    x, carry, _ = jax.jit(lambda t: model.forward(params, buffers, t, start, cfg, documents=documents))(tokens)
    return model.logits(params, x, cfg), carry


def ticks(made: Made, state: slots.Slots, tokens: jax.Array) -> tuple[slots.Slots, jax.Array]:
    """Teacher-forced: B x T tokens to B x T logits, one tick each."""
    cfg, _, _, prepared = made

    def step(state: slots.Slots, token: jax.Array) -> tuple[slots.Slots, jax.Array]:
        return decode._tick(prepared, state, token, cfg)

    run = jax.jit(lambda state, t: jax.lax.scan(step, state, t), compiler_options=decode.COMPILER_OPTIONS)
    state, logits = run(state, tokens.T)
    return state, logits.swapaxes(0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_head": 2, "mem_len": 20},
        {"mem_len": 5},
        {"agg_cache": False},
        {"pe_abs": True, "e_tie": True, "e_preln": True, "e_scale": 0.3},
        {"reset_at_documents": True, "n_head": 2},
        {"reset_at_documents": True, "agg_cache": False},
    ],
    ids=str,
)
def test_decode_equals_forward(changes: dict[str, Any]) -> None:
    made = make(**changes)
    tokens = tokens_of(4, 90)
    want, _ = forward_logits(made, tokens)
    state, got = ticks(made, slots.init_slots(made[0], 4), tokens)
    np.testing.assert_allclose(got, want, atol=2e-5 * float(jnp.abs(want).max()))
    # The same after a prompt of a length that fits no block, in a slot beside others.
    one = slots.admit(made[1], made[2], tokens[1, :61].tolist(), made[0])
    state = slots.insert(state, one, 2)
    _, got = ticks(made, state, jnp.tile(tokens[1:2, 61:], (4, 1)))
    np.testing.assert_allclose(got[2], want[1, 61:], atol=2e-5 * float(jnp.abs(want).max()))


def test_bfloat16_stays_near_forward() -> None:
    made = make(dtype="bfloat16")
    tokens = tokens_of(4, 40)
    want, _ = forward_logits(made, tokens)
    _, got = ticks(made, slots.init_slots(made[0], 4), tokens)
    assert float(jnp.mean(jnp.abs(got - want))) < 0.02 * float(jnp.mean(jnp.abs(want)))


def test_4096_tokens_decode_as_in_one_pass() -> None:
    made = make(n_layer=2, mem_len=32, block_len=32)
    tokens = tokens_of(1, 4096)
    want, _ = forward_logits(made, tokens)
    state, got = ticks(made, slots.init_slots(made[0], 1), tokens)
    np.testing.assert_allclose(jax.nn.log_softmax(got), jax.nn.log_softmax(want), atol=1e-4)
    assert slots.state_bytes(state) == slots.state_bytes(slots.init_slots(made[0], 1))


@pytest.mark.parametrize("changes", [{}, {"reset_at_documents": True, "n_head": 2}], ids=str)
def test_a_slot_is_bit_equal_beside_any_neighbours_in_any_slot_and_batch(changes: dict[str, Any]) -> None:
    """Also admitted late, into a slot that held another sequence, and whether alone or among many."""
    made = make(**{"d_model": 256, "d_k": 16, "d_v": 64, "n_code": 32, "n_vocab": 259, **changes})
    cfg, params, buffers, _ = made
    prompt, more = tokens_of(1, 21)[0].tolist(), tokens_of(8, 40)
    one = slots.admit(params, buffers, prompt, cfg)
    state, alone = ticks(made, slots.insert(slots.init_slots(cfg, 1), one, 0), more[:1])
    after = slots.extract(made[3], state, 0, cfg)
    for n_slot, place in ((8, 0), (8, 5), (4, 3), (7, 1)):
        state, _ = ticks(made, slots.init_slots(cfg, n_slot), more[:n_slot, :13])  # the others are older
        state = slots.insert(state, one, place)
        fed = jnp.where((jnp.arange(n_slot) == place)[:, None], more[0], jnp.roll(more, 3, axis=1)[:n_slot])
        state, got = ticks(made, state, fed)
        np.testing.assert_array_equal(got[place], alone[0], err_msg=f"slot {place} of {n_slot}")
        jax.tree.map(np.testing.assert_array_equal, slots.extract(made[3], state, place, cfg), after)


def test_taking_a_slot_out_and_putting_it_back_changes_nothing() -> None:
    made = make(n_head=2)
    cfg, tokens = made[0], tokens_of(4, 60)
    whole_state, whole = ticks(made, slots.init_slots(cfg, 4), tokens)
    state, _ = ticks(made, slots.init_slots(cfg, 4), tokens[:, :33])
    taken = [slots.extract(made[3], state, i, cfg) for i in range(4)]
    state = slots.init_slots(cfg, 4)
    for i in (2, 0, 3, 1):
        state = slots.insert(state, taken[i], i)
    state, rest = ticks(made, state, tokens[:, 33:])
    np.testing.assert_array_equal(rest, whole[:, 33:])
    np.testing.assert_array_equal(state.position, whole_state.position)


def test_extract_gives_the_state_that_forward_gives() -> None:
    made = make(n_head=2)
    tokens = tokens_of(4, 45)
    _, carry = forward_logits(made, tokens)
    state, _ = ticks(made, slots.init_slots(made[0], 4), tokens)
    got = slots.extract(made[3], state, 2, made[0])
    want = model.VQCarry(attention=jax.tree.map(lambda x: x[:, 2:3], carry.attention), position=carry.position[2:3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def test_a_cleared_slot_is_as_new() -> None:
    made = make()
    tokens = tokens_of(4, 30)
    _, fresh = ticks(made, slots.init_slots(made[0], 4), tokens)
    state, _ = ticks(made, slots.init_slots(made[0], 4), tokens)
    _, got = ticks(made, slots.clear(state, 1), tokens)
    np.testing.assert_array_equal(got[1], fresh[1])


def test_decode_draws_the_same_tokens_however_the_ticks_are_cut() -> None:
    made = make(n_vocab=259)
    cfg, _, _, prepared = made
    settings = sampling_settings(4, temperature=1.2, top_p=0.95, repetition_penalty=1.1)
    keys = jnp.stack([rng.root(i) for i in range(4)])

    def run(cuts: list[int]) -> np.ndarray:
        state, seen = slots.init_slots(cfg, 4), jnp.zeros((4, cfg.n_vocab), jnp.int32)
        token, out = jnp.ones((4,), jnp.int32), []
        for n in cuts:
            state, seen, drawn, logprobs = slots.decode(
                prepared, state, token, settings, keys, seen, cfg=cfg, n_ticks=n
            )
            token = drawn[-1]
            out += [np.asarray(drawn), np.asarray(logprobs)]
        np.testing.assert_array_equal(seen.sum(axis=1), [sum(cuts)] * 4)
        return np.concatenate(out[::2])

    np.testing.assert_array_equal(run([12]), run([4, 4, 4]))


def test_updates_are_in_place() -> None:
    """The memory is the cost of a tick: a copy of it in the loop would double it."""
    made = make(d_v=64, n_code=32)
    cfg, _, _, prepared = made
    for n in (1, 4):
        state = slots.init_slots(cfg, n)
        keys = jnp.stack([rng.root(i) for i in range(n)])
        seen, token = jnp.zeros((n, cfg.n_vocab), jnp.int32), jnp.ones((n,), jnp.int32)
        compiled = slots.decode.lower(
            prepared, state, token, sampling_settings(n), keys, seen, cfg=cfg, n_ticks=4
        ).compile()
        shape = state.units[0].total.shape
        whole = f"f32[{','.join(map(str, shape))}]"
        lines = [line for line in compiled.as_text().splitlines() if f"= {whole}" in line or f"= ({whole}" in line]
        assert lines, "the memory is in the program under its own shape"
        assert [line for line in lines if " copy(" in line or " copy-start(" in line] == []
