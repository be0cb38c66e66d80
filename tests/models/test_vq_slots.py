"""Decoding equals the forward pass, and a slot is batch-invariant."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from linnet.core import quant, rng
from linnet.core.dtypes import WeightDtype
from linnet.core.params import Spec, map_specs
from linnet.core.pytree import n_bytes
from linnet.models.vq import decode, model, slots
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import buffer_specs, param_specs
from linnet.nn.batch_invariant import COMPILER_OPTIONS
from linnet.nn.sampling import sampling_settings

SLOW = pytest.mark.slow

Made = tuple[VQConfig, Any, Any, decode.Prepared]


def make(weights: WeightDtype = "float32", **changes: Any) -> Made:
    """A tiny model in which every weight matters, created with numpy so that nothing is compiled."""
    sizes = {"n_vocab": 30, "d_model": 16, "d_k": 8, "d_v": 16, "n_code": 6, "n_layer": 1, "block_len": 8, "mem_len": 8}
    cfg = VQConfig(**{**sizes, **changes})
    random = np.random.default_rng(1)

    def draw(spec: Spec) -> jax.Array:
        fan_in = max(1, int(np.prod(spec.layer_shape[:-1])))
        return jnp.asarray((spec.init == "ones") + random.normal(0, fan_in**-0.5, spec.shape), jnp.float32)

    params, buffers = map_specs(draw, param_specs(cfg)), map_specs(draw, buffer_specs(cfg))
    params = quant.cast_params(params, param_specs(cfg), weights)
    return cfg, params, buffers, slots.prepare(params, buffers, cfg)


def tokens_of(n_row: int, length: int, n_vocab: int = 30) -> np.ndarray:
    return np.random.default_rng(7).integers(0, n_vocab, (n_row, length), np.int32)


@partial(jax.jit, static_argnames="cfg")
def forward_logits(params: Any, buffers: Any, tokens: Any, cfg: VQConfig) -> tuple[jax.Array, model.VQCarry]:
    documents = jnp.cumsum(tokens == 1, axis=1)
    start = model.empty_carry(cfg, tokens.shape[0])
    x, carry, _ = model.forward(params, buffers, tokens, start, cfg, documents=documents)
    return model.logits(params, x, cfg), carry


@partial(jax.jit, static_argnames="cfg", compiler_options=COMPILER_OPTIONS)
def ticks(
    prepared: decode.Prepared, state: slots.VQSlots, tokens: Any, cfg: VQConfig
) -> tuple[slots.VQSlots, Float[Array, "T B A"]]:
    """Teacher-forced: B x T tokens, one tick each."""
    return jax.lax.scan(
        lambda state, token: decode.read_token(prepared, state, token, None, cfg), state, jnp.asarray(tokens).T
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"n_head": 2, "mem_len": 20, "pe_abs": True, "e_tie": True, "e_preln": True, "e_scale": 0.3}, marks=SLOW
        ),
        {"mem_len": 5, "reset_at_documents": True, "n_head": 2},
        pytest.param({"agg_cache": False, "reset_at_documents": True}, marks=SLOW),
        pytest.param({"weights": "int8"}, marks=SLOW),
        pytest.param({"weights": "bfloat16", "e_tie": True}, marks=SLOW),
        pytest.param({"n_expert": 4, "n_choice": 2}, marks=SLOW),
        {"n_expert": 3, "n_choice": 1, "weights": "int8"},
    ],
    ids=str,
)
def test_decode_equals_forward(changes: dict[str, Any]) -> None:
    cfg, params, buffers, prepared = make(**changes)
    tokens = tokens_of(4, 60)
    logits, carry = forward_logits(params, buffers, tokens, cfg)
    want = np.asarray(logits)
    state, got = ticks(prepared, slots.init_slots(cfg, 4), tokens, cfg)
    close = partial(np.testing.assert_allclose, atol=2e-5 * float(np.abs(want).max()))
    close(np.asarray(got).swapaxes(0, 1), want)
    if not cfg.reset_at_documents:  # else forward's state names its documents otherwise
        taken = slots.extract(prepared, state, 2, cfg)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[:, 2:3], atol=2e-5), taken.attention, carry.attention)
    # The same after a prompt of a length that fits no block, in a slot beside others.
    state = slots.insert(state, slots.DECODER.prefill(params, buffers, tokens[1, :37].tolist(), cfg), 2)
    rest = np.zeros_like(tokens)
    rest[:, :23] = tokens[1, 37:]
    _, got = ticks(prepared, state, rest, cfg)
    close(np.asarray(got)[:23, 2], want[1, 37:])


def test_bfloat16_is_close_to_forward() -> None:
    cfg, params, buffers, prepared = make(dtype="bfloat16")
    tokens = tokens_of(4, 40)
    want = np.asarray(forward_logits(params, buffers, tokens, cfg)[0])
    got = np.asarray(ticks(prepared, slots.init_slots(cfg, 4), tokens, cfg)[1]).swapaxes(0, 1)
    assert np.abs(got - want).mean() < 0.02 * np.abs(want).mean()


def test_decoding_4096_tokens_equals_one_forward_pass() -> None:
    cfg, params, buffers, prepared = make(mem_len=32, block_len=32)
    tokens = tokens_of(1, 4096)
    want = np.asarray(forward_logits(params, buffers, tokens, cfg)[0])[0]
    state, got = ticks(prepared, slots.init_slots(cfg, 1), tokens, cfg)
    np.testing.assert_allclose(np.asarray(got)[:, 0], want, atol=1e-4)
    assert n_bytes(state) == n_bytes(slots.init_slots(cfg, 1))


@pytest.mark.optimized
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=SLOW),
        pytest.param({"reset_at_documents": True, "n_head": 2}, marks=SLOW),
        {"weights": "int8"},
        pytest.param({"n_expert": 4}, marks=SLOW),
    ],
    ids=str,
)
def test_slot_is_batch_invariant(changes: dict[str, Any]) -> None:
    """Also if admitted late, into a used slot, alone or among many."""
    cfg, params, buffers, prepared = make(
        **{"d_model": 512, "d_k": 16, "d_v": 64, "n_code": 32, "n_vocab": 259, **changes}
    )
    more, others = tokens_of(13, 40), np.roll(tokens_of(13, 40), 3, axis=1)
    one = slots.DECODER.prefill(params, buffers, tokens_of(1, 21)[0].tolist(), cfg)
    state, alone = ticks(prepared, slots.insert(slots.init_slots(cfg, 1), one, 0), more[:1], cfg)
    after = slots.extract(prepared, state, 0, cfg)
    for n_slot, place in ((8, 0), (8, 7), (3, 1), (13, 12)):
        state, _ = ticks(prepared, slots.init_slots(cfg, n_slot), more[:n_slot], cfg)  # the others are older
        state = slots.insert(state, one, place)
        fed = others[:n_slot].copy()
        fed[place] = more[0]
        state, got = ticks(prepared, state, fed, cfg)
        np.testing.assert_array_equal(np.asarray(got)[:, place], np.asarray(alone)[:, 0], f"slot {place} of {n_slot}")
        jax.tree.map(np.testing.assert_array_equal, slots.extract(prepared, state, place, cfg), after)


def test_extract_and_insert_round_trip() -> None:
    cfg, _, _, prepared = make(n_head=2)
    tokens = tokens_of(4, 60)
    state, _ = ticks(prepared, slots.init_slots(cfg, 4), tokens[:, :30], cfg)
    taken = [slots.extract(prepared, state, i, cfg) for i in range(4)]
    kept, want = ticks(prepared, state, tokens[:, 30:], cfg)
    state = slots.init_slots(cfg, 4)
    for i in (2, 0, 3, 1):
        state = slots.insert(state, taken[i], i)
    state, got = ticks(prepared, state, tokens[:, 30:], cfg)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(state.position, kept.position)


def test_cleared_slot_equals_a_new_one() -> None:
    cfg, _, _, prepared = make(n_head=2)
    tokens = tokens_of(4, 30)
    state, fresh = ticks(prepared, slots.init_slots(cfg, 4), tokens, cfg)
    _, got = ticks(prepared, slots.clear(state, 1), tokens, cfg)
    np.testing.assert_array_equal(np.asarray(got)[:, 1], np.asarray(fresh)[:, 1])


def test_tokens_do_not_depend_on_ticks_per_dispatch() -> None:
    cfg, _, _, prepared = make()
    settings = sampling_settings(4, temperature=1.2, top_p=0.95, repetition_penalty=1.1)
    keys = jnp.stack([rng.root(i) for i in range(4)])

    def run(splits: list[int]) -> np.ndarray:
        state, seen = slots.init_slots(cfg, 4), jnp.zeros((4, cfg.n_vocab), jnp.int32)
        token, out = jnp.ones((4,), jnp.int32), []
        for n in splits:
            state, seen, drawn, logprobs, _ = slots.decode(
                prepared, state, token, settings, keys, seen, cfg=cfg, n_ticks=n
            )
            token = drawn[-1]
            out += [np.asarray(drawn), np.asarray(logprobs)]
        np.testing.assert_array_equal(seen.sum(axis=1), [sum(splits)] * 4)
        return np.concatenate(out[::2])

    np.testing.assert_array_equal(run([8]), run([4, 4]))


def test_updates_are_in_place() -> None:
    """A tick is memory-bound: copying the state in the loop would double its cost."""
    cfg, _, _, prepared = make(d_v=64, n_code=32)
    for n in (1, 4):
        state = slots.init_slots(cfg, n)
        keys = jnp.stack([rng.root(i) for i in range(n)])
        seen, token = jnp.zeros((n, cfg.n_vocab), jnp.int32), jnp.ones((n,), jnp.int32)
        jitted: Any = slots.decode
        compiled = jitted.lower(prepared, state, token, sampling_settings(n), keys, seen, cfg=cfg, n_ticks=4).compile()
        shape = state.units[0].total.shape
        whole = f"f32[{','.join(map(str, shape))}]"
        lines = [line for line in compiled.as_text().splitlines() if f"= {whole}" in line or f"= ({whole}" in line]
        assert lines, "the memory is in the program under its own shape"
        assert [line for line in lines if " copy(" in line or " copy-start(" in line] == []
