"""The engine with `moe` models, whose state grows up to a context, and with `vq-moe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from engine_requests import (
    MOE,
    VQ_MOE,
    Model,
    PendingRequest,
    ask,
    assert_altered_is_rejected,
    plain,
    request,
    running_engine,
)
from engine_trials import result, solo

from linnet.core import quant
from linnet.core.errors import UserError
from linnet.models.moe.cache import BLOCK
from linnet.serve import state as states
from linnet.serve.engine import Engine
from linnet.serve.request import Constraint, Request
from linnet.serve.sessions import MemorySessions
from linnet.serve.state import State

pytestmark = pytest.mark.optimized

CONTEXT = MOE.cfg.context


def lowered(model: Model) -> Model:
    """8-bit weights and 16-bit activations."""
    params = quant.cast_params(model.params, model.family.param_specs(model.cfg), "int8")
    return dataclasses.replace(model, params=params, cfg=dataclasses.replace(model.cfg, dtype="bfloat16"))


@pytest.fixture(scope="module", params=["moe", pytest.param("vq-moe", marks=pytest.mark.trial)])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Engine]]:
    model = {"moe": MOE, "vq-moe": VQ_MOE}[request.param]
    with running_engine(model) as engine:
        yield model, engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(MOE) as engine:
        yield engine


def through_a_file(engine: Engine, state: State) -> State:
    return states.from_bytes(states.to_bytes(state), engine.backend.abstract_state, engine.fingerprint)


@pytest.mark.slow
def test_concurrent_requests_equal_solo_runs(served: tuple[Model, Engine]) -> None:
    """More requests than slots, so that some are preempted; some run beside a grammar."""
    model, engine = served
    draw = np.random.default_rng(0)
    requests = [
        request(
            bytes(draw.integers(0, 256, int(draw.integers(0, 300)), np.uint8)),
            seed=i,
            max_tokens=int(draw.integers(1, 150)),
            temperature=float(draw.choice([0.0, 0.7, 1.3])),
            top_p=float(draw.choice([0.5, 1.0])),
            repetition_penalty=float(draw.choice([1.0, 1.2])),
            priority=int(draw.integers(0, 3)),
        )
        for i in range(12)
    ]
    grammar = PendingRequest(
        engine, request("y", constraint=Constraint(kind="regex", grammar="[a-z]{30}"), max_tokens=30)
    )
    for one, waiting in [(one, PendingRequest(engine, one)) for one in requests]:
        answer = waiting.answer()
        assert result(answer) == result(solo(one, n_slots=3, model=model))
        if model is MOE:
            assert (answer.tokens, answer.logprobs) == plain(one, model)
    assert grammar.answer().text.isalpha()


def test_request_is_batch_invariant(served: tuple[Model, Engine]) -> None:
    """Also top log-probabilities, prompt log-probabilities and the state."""
    model, engine = served
    asked = request("the one " * 20, seed=2, max_tokens=21, top_logprobs=3, prompt_logprobs=True, return_state=True)
    alone = result(solo(asked, n_slots=3, model=model))
    neighbours = [PendingRequest(engine, request("x" * 270, seed=i, max_tokens=40)) for i in range(4)]
    for i in range(2):
        assert result(PendingRequest(engine, dataclasses.replace(asked, id=f"again-{i}")).answer()) == alone
    for other in neighbours:
        other.answer()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [MOE, pytest.param(VQ_MOE, marks=pytest.mark.trial), lowered(MOE)], ids=["moe", "vq-moe", "int8"]
)
def test_state_from_a_file_continues_exactly_in_another_engine(model: Model) -> None:
    with running_engine(model) as engine:
        whole = ask(engine, "once upon " * 12, seed=9, max_tokens=40)
        firsts = {
            n: ask(engine, "once upon " * 12, seed=9, max_tokens=n, return_state=True) for n in (1, 7, 8, 23)
        }  # the 7th token is the last of the first block, the 8th begins another
    with running_engine(model) as other:
        neighbours = [PendingRequest(other, request("x" * 200, seed=i, max_tokens=300)) for i in range(2)]
        for n, first in firsts.items():
            restored = through_a_file(other, first.end.state)
            assert states.to_bytes(restored) == states.to_bytes(first.end.state)
            rest = ask(other, "", seed=9, max_tokens=40 - n, state=restored)
            assert first.tokens + rest.tokens == whole.tokens
            assert first.logprobs + rest.logprobs == whole.logprobs
            again = ask(other, " and more", seed=3, state=restored)
            straight = ask(other, " and more", seed=3, state=first.end.state)
            assert (again.tokens, again.logprobs) == (straight.tokens, straight.logprobs)
        for neighbour in neighbours:
            neighbour.answer()


def test_state_of_a_quantized_model_is_16_bit(engine: Engine) -> None:
    with running_engine(lowered(MOE)) as half:
        state = ask(half, "x", return_state=True).end.state
        full = ask(engine, "x", return_state=True).end.state
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.memory)} == {"bfloat16", "int32"}
        assert len(states.to_bytes(state)) < 0.6 * len(states.to_bytes(full))
        with pytest.raises(UserError, match="another model"):
            through_a_file(half, full)


def test_forks_are_independent(served: tuple[Model, Engine]) -> None:
    _, engine = served
    sessions = MemorySessions(engine.backend.abstract_state, engine.fingerprint)
    first = sessions.create()
    state = ask(engine, "a talk of two ", seed=1, max_tokens=30, return_state=True).end.state
    sessions.put(first, state, state.n_tokens - 1)
    fork = sessions.fork(first)
    assert sessions.save(fork) == sessions.save(first)
    left = ask(engine, "left", seed=1, state=sessions.get(first).state, return_state=True)
    saved = sessions.save(fork)
    right = ask(engine, "right", seed=1, state=sessions.get(fork).state)
    assert left.tokens != right.tokens
    assert sessions.save(fork) == saved
    again = ask(engine, "left", seed=1, state=sessions.get(sessions.restore(saved)).state, return_state=True)
    assert states.to_bytes(again.end.state) == states.to_bytes(left.end.state)


def test_state_contains_nothing_of_the_slots_earlier_request() -> None:
    """Slots are first filled by other requests; then a state that ends within a block must have an empty rest."""
    short = request("brief", seed=4, max_tokens=9, return_state=True)
    with running_engine(MOE) as engine:
        for before in [PendingRequest(engine, request("a secret! " * 60, max_tokens=CONTEXT)) for _ in range(3)]:
            before.answer()
        after = PendingRequest(engine, short).answer().end.state
    assert states.to_bytes(after) == states.to_bytes(solo(short, n_slots=3, model=MOE).end.state)
    (block,) = after.memory.blocks
    n_read = after.n_tokens - 1
    assert 0 < n_read < BLOCK
    assert np.abs(np.asarray(block.keys)[:, :, :n_read]).max() > 0
    for rest in (block.keys[:, :, n_read:], block.values[:, :, n_read:], block.tokens[n_read:]):
        assert not np.asarray(rest).any()


def test_foreign_or_corrupt_state_is_rejected(engine: Engine) -> None:
    assert_altered_is_rejected(engine, ask(engine, "hello " * 30, return_state=True).end.state)


def test_state_with_a_wrong_length_is_rejected(engine: Engine) -> None:
    state = ask(engine, "hello " * 30, return_state=True).end.state
    for n_tokens in (0, 2, state.n_tokens + BLOCK, 10**9):
        with pytest.raises(UserError):
            through_a_file(engine, dataclasses.replace(state, n_tokens=n_tokens))


def test_prefix_cache_shares_blocks_and_is_exact() -> None:
    beginning = b"a beginning that many share. " * 20
    size = MOE.family.decoder.chunk_len(MOE.cfg)
    n_chunks = len(beginning) // size
    assert n_chunks == 2
    asked = {"seed": 5, "top_logprobs": 3, "return_state": True}
    with running_engine(MOE, prefix_bytes=0) as cold:
        want = ask(cold, beginning + b"x", **asked)
        assert cold.stats()["prefix_bytes"] == 0
    with running_engine(MOE) as engine:
        first = ask(engine, beginning + b"y", seed=6)
        block = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(engine.backend.abstract_state(BLOCK)))
        # After each chunk a state is kept: the second has the blocks of the first, which count once.
        assert engine.stats()["prefix_bytes"] == n_chunks * size // BLOCK * block
        hit = ask(engine, beginning + b"x", **asked)
        skipped = ask(engine, beginning + b"x", **asked, use_prefix_cache=False)
        assert engine.stats()["prefix_bytes"] == n_chunks * size // BLOCK * block
    assert [one.read.n_cached for one in (first, hit, skipped) if one.read] == [0, n_chunks * size, 0]
    for answer in (hit, skipped):
        assert {**result(answer), "prompt": None} == {**result(want), "prompt": None}


def test_continuing_a_state_matches_one_prefill(engine: Engine) -> None:
    """For states of any length: another program prefills the rest, so values are close, not equal."""
    text = bytes(np.random.default_rng(1).integers(97, 123, CONTEXT - 1, np.uint8))
    whole = ask(engine, text, prompt_logprobs=True, max_tokens=1).read
    assert whole is not None
    assert whole.logprobs is not None
    for at in (1, BLOCK, 300, 511, CONTEXT - 40):
        begun = ask(engine, text[:at], max_tokens=1, return_state=True, allowed=frozenset({text[at] + 3}))
        rest = ask(engine, text[at + 1 :], prompt_logprobs=True, max_tokens=1, state=begun.end.state).read
        assert rest is not None
        assert rest.logprobs is not None
        np.testing.assert_allclose(
            np.asarray(rest.logprobs, float), np.asarray(whole.logprobs[at + 1 :], float), rtol=2e-4, atol=2e-4
        )


def test_too_long_prompt_is_rejected_or_truncated(engine: Engine) -> None:
    text = bytes(np.random.default_rng(2).integers(97, 123, 2 * CONTEXT, np.uint8))
    with pytest.raises(UserError, match=f"at most {CONTEXT - 1}: the context is {CONTEXT} tokens"):
        ask(engine, text)
    for max_tokens, kept in ((1, CONTEXT - 1), (100, CONTEXT - 100), (CONTEXT * 9, CONTEXT // 2)):
        cut = ask(engine, text, max_tokens=max_tokens, truncate_prompt=True, seed=3)
        assert cut.read is not None
        assert (cut.read.n_tokens, cut.read.n_truncated) == (kept, len(text) - kept)
        assert (cut.end.n_tokens, cut.end.reason) == (min(max_tokens, CONTEXT - kept), "length")
        same = ask(engine, text[-kept:], max_tokens=max_tokens, seed=3)
        assert (cut.tokens, cut.logprobs) == (same.tokens, same.logprobs)
        assert same.read is not None
        assert same.read.n_truncated == 0


def test_answer_and_session_end_at_the_context(engine: Engine) -> None:
    whole = ask(engine, "x" * 600, seed=1, max_tokens=10**6, return_state=True)
    assert (whole.end.reason, whole.end.n_tokens) == ("length", CONTEXT - 600)
    assert whole.end.state.n_tokens == CONTEXT + 1
    with pytest.raises(UserError, match="the session is"):
        ask(engine, "", state=whole.end.state)
    # A token before the end there is room for one more, though not for a prompt.
    first = ask(engine, "x" * 600, seed=1, max_tokens=CONTEXT - 601, return_state=True)
    last = ask(engine, "", seed=1, max_tokens=5, state=through_a_file(engine, first.end.state))
    assert first.tokens + last.tokens == whole.tokens
    for cut in (False, True):
        with pytest.raises(UserError, match="the session is"):
            ask(engine, "y", state=first.end.state, truncate_prompt=cut)


def test_session_prompt_is_truncated_to_the_remaining_context(engine: Engine) -> None:
    state = ask(engine, "x" * 500, max_tokens=10, return_state=True).end.state
    left = CONTEXT - state.n_tokens
    text = bytes(np.random.default_rng(3).integers(97, 123, left + 50, np.uint8))
    with pytest.raises(UserError, match=f"at most {left}:"):
        ask(engine, text, state=state)
    cut = ask(engine, text, state=state, truncate_prompt=True, max_tokens=11)
    assert cut.read is not None
    assert (cut.read.n_tokens, cut.read.n_truncated) == (left - 10, 60)
    assert cut.end.n_tokens == 11
    assert cut.tokens == ask(engine, text[60:], state=state, max_tokens=11).tokens


def test_grammar_ends_at_the_context(engine: Engine) -> None:
    endless: dict[str, Any] = {"constraint": Constraint(kind="regex", grammar="[a-z]+!"), "banned": frozenset({36})}
    answer = ask(engine, "x" * 620, max_tokens=10**4, **endless)
    assert (answer.end.reason, answer.end.n_tokens) == ("length", CONTEXT - 620)


def test_preempted_requests_share_prefill_blocks(engine: Engine) -> None:
    """More long requests than slots: each equals its solo run, although it ran in several slots."""
    requests: list[Request] = [request(f"{i}" * 200, seed=i, max_tokens=400) for i in range(5)]
    asked = [PendingRequest(engine, one) for one in requests]
    urgent = request("now", seed=77, max_tokens=10, priority=5)
    assert PendingRequest(engine, urgent).answer().tokens == plain(urgent, MOE)[0]
    for one, waiting in zip(requests, asked, strict=True):
        assert waiting.answer().tokens == plain(one, MOE)[0]
