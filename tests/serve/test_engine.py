"""The engine: tokens and log-probabilities of a request are bit-identical, whatever else runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_requests import (
    BUFFERS,
    CFG,
    FAMILY,
    PARAMS,
    PendingRequest,
    ask,
    assert_altered_is_rejected,
    plain,
    request,
    running_engine,
)

from linnet.core.errors import UserError
from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS
from linnet.models.generate import generate
from linnet.nn.sampling import sampling_settings
from linnet.serve import state as states
from linnet.serve.backend import N_TICKS
from linnet.serve.engine import Engine
from linnet.serve.request import Constraint, Finished, PrefillDone, Request, TokensEvent


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


@pytest.mark.optimized
def test_concurrent_requests_equal_solo_runs(engine: Engine) -> None:
    draw = np.random.default_rng(0)
    requests = [
        request(
            bytes(draw.integers(0, 256, int(draw.integers(0, 300)), np.uint8)),
            seed=int(draw.integers(0, 2**32)),
            max_tokens=int(draw.integers(1, 60)),
            temperature=float(draw.choice([0.0, 0.7, 1.3])),
            top_p=float(draw.choice([0.5, 0.9, 1.0])),
            top_k=int(draw.choice([0, 7])),
            repetition_penalty=float(draw.choice([1.0, 1.2])),
            typical_p=float(draw.choice([1.0, 0.6])),
            priority=int(draw.integers(0, 3)),
        )
        for _ in range(24)
    ]
    requested = [PendingRequest(engine, one) for one in requests]
    for one, waiting in zip(requests, requested, strict=True):
        answer = waiting.answer()
        tokens, logprobs = plain(one)
        assert answer.tokens == tokens
        assert answer.logprobs == logprobs
        assert answer.end.reason == "length"
        assert answer.end.n_tokens == one.sampling.max_tokens


@pytest.mark.optimized
def test_single_request_starts_immediately_and_prefix_cache_is_exact(engine: Engine) -> None:
    prompt = "a beginning that many share. " * 20
    with running_engine(prefix_bytes=0) as cold:
        want = ask(cold, prompt + "x", seed=5, top_logprobs=3)
        first = ask(engine, prompt + "y", seed=6)
        hit = ask(engine, prompt + "x", seed=5, top_logprobs=3)
        skipped = ask(engine, prompt + "x", seed=5, top_logprobs=3, use_prefix_cache=False)
    assert first.read is not None and first.read.n_cached == 0  # noqa: PT018
    assert hit.read is not None
    assert hit.read.n_cached == 512 == max(2**k for k in range(12) if 2**k <= len(prompt))
    for answer in (hit, skipped):
        assert (answer.tokens, answer.logprobs, answer.top) == (want.tokens, want.logprobs, want.top)


def test_first_token_is_unbatched_and_does_not_shorten_dispatches(engine: Engine) -> None:
    runs = PendingRequest(engine, request(b"one who runs", max_tokens=1 + 20 * N_TICKS, ignore_eos=True))
    first = runs.events.get(timeout=60), runs.events.get(timeout=60)
    newcomers = [PendingRequest(engine, request(b"late", max_tokens=40, ignore_eos=True))]
    reported = [first[1]]
    while not isinstance(reported[-1], Finished):
        reported.append(runs.events.get(timeout=60))
    assert [len(event.tokens) for event in reported if isinstance(event, TokensEvent)] == [1, *[N_TICKS] * 20]
    for one in newcomers:
        one.events.get(timeout=60)
        event = one.events.get(timeout=60)
        assert isinstance(event, TokensEvent)
        assert len(event.tokens) == 1


@pytest.mark.optimized
def test_restored_state_continues_exactly(engine: Engine) -> None:
    full = ask(engine, "once upon", seed=9, max_tokens=40)
    for cut in (1, 7, 8, 9, 23):
        first = ask(engine, "once upon", seed=9, max_tokens=cut, return_state=True)
        saved = states.to_bytes(first.end.state)
        restored = states.from_bytes(saved, engine.backend.abstract_state, engine.fingerprint)
        rest = ask(engine, "", seed=9, max_tokens=40 - cut, state=restored)
        assert first.tokens + rest.tokens == full.tokens
        assert first.logprobs + rest.logprobs == full.logprobs
        assert first.end.state.n_tokens == 1 + 9 + cut


@pytest.mark.optimized
def test_state_is_batch_invariant(engine: Engine) -> None:
    alone = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    neighbours = [PendingRequest(engine, request("x" * 200, seed=i, max_tokens=50)) for i in range(4)]
    busy = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    grammar = PendingRequest(
        engine, request("y", constraint=Constraint(kind="regex", grammar="[a-z]{30}"), max_tokens=30)
    )
    beside = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    for other in (*neighbours, grammar):
        other.answer()
    for answer in (busy, beside):
        assert answer.tokens == alone.tokens
        assert states.to_bytes(answer.end.state) == states.to_bytes(alone.end.state)
    again = [ask(engine, " more", seed=3, state=answer.end.state).tokens for answer in (alone, busy, beside)]
    assert again[0] == again[1] == again[2]


def test_foreign_or_corrupt_state_is_rejected(engine: Engine) -> None:
    state = ask(engine, "hello", return_state=True).end.state
    assert_altered_is_rejected(engine, state)
    with pytest.raises(UserError, match="another model"):
        engine.submit(request(state=dataclasses.replace(state, model="0" * 64)), print)


def test_sampling_settings_of_a_request(engine: Engine) -> None:
    allowed = frozenset({70, 80, 90})
    assert set(ask(engine, max_tokens=30, allowed=allowed).tokens) <= allowed
    assert not set(ask(engine, max_tokens=200, banned=frozenset(range(3, 200))).tokens) & set(range(3, 200))
    assert set(ask(engine, max_tokens=20, logit_bias={77: 100.0}).tokens) == {77}
    assert 77 not in ask(engine, max_tokens=20, allowed=frozenset({77, 78}), logit_bias={77: -100.0}).tokens
    often = ask(engine, max_tokens=60, temperature=0.0).tokens
    sometimes = ask(engine, max_tokens=60, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0).tokens
    assert len(set(sometimes)) > len(set(often))


def test_images_equal_those_of_linnet_sample(engine: Engine) -> None:
    """Both forbid the same ids with the same arithmetic."""
    values = range(FIRST_BYTE, N_BYTE_IDS)
    answer = ask(engine, seed=5, max_tokens=90, temperature=30.0, allowed=frozenset(values))
    settings = sampling_settings(1, temperature=30.0)
    pieces = generate(
        FAMILY.decoder,
        PARAMS,
        BUFFERS,
        CFG,
        [[]],
        max_tokens=90,
        settings=settings,
        seeds=[5],
        ignore_end=True,
        allowed=values,
    )
    painted = [token for (piece,) in pieces if piece is not None for token in piece.tokens]
    assert answer.tokens == painted
    assert min(painted) >= FIRST_BYTE


def test_top_logprobs_are_the_most_likely_tokens(engine: Engine) -> None:
    answer = ask(engine, "abc", temperature=0.0, top_logprobs=4)
    for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.top, strict=True):
        assert len(top) == 4
        assert (top[0].token, top[0].logprob) == (token, pytest.approx(logprob, abs=1e-6))
        assert [c.logprob for c in top] == sorted((c.logprob for c in top), reverse=True)


def test_prompt_logprobs_equal_the_models(engine: Engine) -> None:
    requested = request("x" * 40 + "abcdefg" * 30, prompt_logprobs=True)
    answer = PendingRequest(engine, requested).answer()
    assert answer.read is not None
    logprobs = answer.read.logprobs
    assert logprobs is not None
    assert len(logprobs) == len(requested.prompt)
    tokens = np.array([[1, *requested.prompt[:-1]]], np.int32)
    from linnet.data.batch import Batch

    batch = Batch(
        inputs=tokens,
        targets=np.array([requested.prompt], np.int32),
        doc_ids=np.zeros_like(tokens),
        loss_mask=np.ones(tokens.shape, np.float32),
    )
    want, _ = FAMILY.nats(PARAMS, BUFFERS, FAMILY.empty_carry(CFG, 1), jax.tree.map(jnp.asarray, batch), CFG)
    np.testing.assert_allclose(np.asarray(logprobs, float), -np.asarray(want)[0], rtol=1e-4, atol=1e-5)
    assert answer.tokens == plain(requested)[0]


def test_prompt_top_logprobs_equal_the_models(engine: Engine) -> None:
    def read(requested: Request) -> PrefillDone:
        reported = PendingRequest(engine, requested).answer().read
        assert reported is not None
        return reported

    requested = request("x" * 40 + "abcdefg" * 30, prompt_logprobs=True, top_logprobs=5)
    bare = read(dataclasses.replace(requested, sampling=dataclasses.replace(requested.sampling, top_logprobs=0)))
    reported = read(requested)
    assert bare.top == ()
    assert bare.logprobs == reported.logprobs  # the same bits, whether or not someone asked for more
    assert len(reported.top) == len(requested.prompt)
    for row in reported.top:
        assert len(row) == 5
        assert [choice.logprob for choice in row] == sorted((choice.logprob for choice in row), reverse=True)
    # A prompt with another token at a place tells what that one would have had there.
    place = 150
    likeliest = {choice.token: choice.logprob for choice in reported.top[place]}
    for token in (*likeliest, 3, 70, 200):
        other = read(dataclasses.replace(requested, prompt=(*requested.prompt[:place], token)))
        assert other.logprobs is not None
        if token in likeliest:
            assert likeliest[token] == other.logprobs[place]
        else:
            logprob = other.logprobs[place]
            assert logprob is not None
            assert logprob <= min(likeliest.values())


def test_grammar_constrains_the_answer(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = Constraint(kind="json_schema", grammar=json.dumps(schema))
    for seed in range(4):
        answer = ask(engine, seed=seed, max_tokens=400, constraint=constraint, ignore_eos=False)
        if answer.end.reason == "stop":
            assert isinstance(json.loads(answer.text)["a"], int)
    answer = ask(
        engine, seed=3, max_tokens=50, constraint=Constraint(kind="regex", grammar="(ab|cd){5}"), ignore_eos=False
    )
    assert re.fullmatch("(ab|cd){5}", answer.text)
    assert answer.end.reason == "stop"
    with pytest.raises(UserError):
        ask(engine, constraint=Constraint(kind="regex", grammar="(("))
    stuck = ask(engine, constraint=Constraint(kind="regex", grammar="a+b"), banned=frozenset({ord("a") + 3}))
    assert stuck.end.reason == "stuck"


@pytest.mark.optimized
def test_preempted_requests_are_exact() -> None:
    """More long requests than slots: they are preempted and continue in other slots, bit-identically."""
    with running_engine(n_slots=2) as engine:
        requests = [request(f"{i}", seed=i, max_tokens=700) for i in range(4)]
        requested = [PendingRequest(engine, one) for one in requests]
        urgent = request("now", seed=77, max_tokens=10, priority=5)
        assert PendingRequest(engine, urgent).answer().tokens == plain(urgent)[0]
        for one, waiting in zip(requests, requested, strict=True):
            assert waiting.answer().tokens == plain(one)[0]
