"""The engine: a request's tokens and log-probabilities are its own, bit for bit, whatever happens around it."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny

from linnet import params as weights
from linnet import rng
from linnet.data.tokenizer import BytesTokenizer
from linnet.errors import UserError
from linnet.families import registry
from linnet.families.generate import generate
from linnet.nn.sampling import sampling_settings
from linnet.serve import state as states
from linnet.serve.engine import Engine, EngineConfig
from linnet.serve.request import Constraint, Event, Finished, Produced, PromptRead, QueueFull, Request, Sampling

CFG = tiny.MODEL
FAMILY = registry.get("vq")
PARAMS = weights.init(FAMILY.param_specs(CFG), rng.root(3))
BUFFERS = weights.init(FAMILY.buffer_specs(CFG), rng.root(4))


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    text: str
    end: Finished
    read: PromptRead | None
    top: list[Any]


class Asked:
    """A request on its way; `answer` waits for its end."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.engine, self.request = engine, request
        engine.submit(request, self.events.put)

    def answer(self, timeout: float = 60) -> Answer:
        answer = Answer([], [], "", None, None, [])  # pyright: ignore[reportArgumentType]
        while True:
            event = self.events.get(timeout=timeout)
            if isinstance(event, PromptRead):
                answer.read = event
            elif isinstance(event, Produced):
                answer.tokens += [choice.token for choice in event.tokens]
                answer.logprobs += [choice.logprob for choice in event.tokens]
                answer.text += event.text
                answer.top += event.top
            else:
                answer.end = event
                assert self.events.empty(), "an event after the last"
                return answer


def make(**changes: Any) -> Engine:
    config = EngineConfig(**{"n_slots": 3, "max_waiting": 100, "prefix_bytes": 1 << 24, **changes})
    return Engine(FAMILY, CFG, PARAMS, BUFFERS, BytesTokenizer(), config).start()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make()
    yield engine
    engine.stop(within=5)


counter = iter(range(10**9))


def request(prompt: str | bytes = "", **changes: Any) -> Request:
    own = {name: changes.pop(name) for name in list(changes) if name in Request.__dataclass_fields__}
    data = prompt.encode() if isinstance(prompt, str) else prompt
    sampling = Sampling(**{"max_tokens": 12, "ignore_end": True, **changes})
    return Request(id=f"r{next(counter)}", prompt=tuple(b + 3 for b in data), sampling=sampling, **own)


def ask(engine: Engine, prompt: str | bytes = "", **changes: Any) -> Answer:
    return Asked(engine, request(prompt, **changes)).answer()


def plain(asked: Request) -> tuple[list[int], list[float]]:
    """The same by the plain generator, alone."""
    s = asked.sampling
    settings = sampling_settings(
        1,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        typical_p=s.typical_p,
        repetition_penalty=s.repetition_penalty,
    )
    pieces = generate(
        FAMILY.decoder,
        PARAMS,
        BUFFERS,
        CFG,
        [list(asked.prompt)],
        max_tokens=s.max_tokens,
        settings=settings,
        seeds=[s.seed],
        ignore_end=s.ignore_end,
    )
    found = [piece for (piece,) in pieces if piece is not None]
    return [t for piece in found for t in piece.tokens], [v for piece in found for v in piece.logprobs]


def test_many_at_once_are_each_as_alone(engine: Engine) -> None:
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
    asked = [Asked(engine, one) for one in requests]
    for one, waiting in zip(requests, asked, strict=True):
        answer = waiting.answer()
        tokens, logprobs = plain(one)
        assert answer.tokens == tokens
        assert answer.logprobs == logprobs
        assert answer.end.reason == "length"
        assert answer.end.n_tokens == one.sampling.max_tokens


def test_one_alone_runs_at_once_and_the_cache_changes_no_bit(engine: Engine) -> None:
    prompt = "a beginning that many share. " * 20
    cold = make(prefix_bytes=0)
    try:
        want = ask(cold, prompt + "x", seed=5, top_logprobs=3)
        first = ask(engine, prompt + "y", seed=6)
        hit = ask(engine, prompt + "x", seed=5, top_logprobs=3)
        skipped = ask(engine, prompt + "x", seed=5, top_logprobs=3, use_prefix_cache=False)
    finally:
        cold.stop(within=5)
    assert first.read is not None and first.read.n_cached == 0  # noqa: PT018
    assert hit.read is not None
    assert hit.read.n_cached == 512 == max(2**k for k in range(12) if 2**k <= len(prompt))
    for answer in (hit, skipped):
        assert (answer.tokens, answer.logprobs, answer.top) == (want.tokens, want.logprobs, want.top)


def test_a_state_goes_on_as_if_never_stopped(engine: Engine) -> None:
    whole = ask(engine, "once upon", seed=9, max_tokens=40)
    for cut in (1, 7, 8, 9, 23):
        first = ask(engine, "once upon", seed=9, max_tokens=cut, return_state=True)
        saved = states.to_bytes(first.end.state)
        restored = states.from_bytes(saved, engine.backend.empty_memory(), engine.fingerprint)
        rest = ask(engine, "", seed=9, max_tokens=40 - cut, state=restored)
        assert first.tokens + rest.tokens == whole.tokens
        assert first.logprobs + rest.logprobs == whole.logprobs
        assert first.end.state.n_tokens == 1 + 9 + cut


def test_a_state_does_not_depend_on_neighbours(engine: Engine) -> None:
    alone = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    neighbours = [Asked(engine, request("x" * 200, seed=i, max_tokens=50)) for i in range(4)]
    busy = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    grammar = Asked(engine, request("y", constraint=Constraint(kind="regex", grammar="[a-z]{30}"), max_tokens=30))
    beside = ask(engine, "hello", seed=2, max_tokens=21, return_state=True)
    for other in (*neighbours, grammar):
        other.answer()
    for answer in (busy, beside):
        assert answer.tokens == alone.tokens
        assert states.to_bytes(answer.end.state) == states.to_bytes(alone.end.state)
    again = [ask(engine, " more", seed=3, state=answer.end.state).tokens for answer in (alone, busy, beside)]
    assert again[0] == again[1] == again[2]


def test_a_state_that_is_not_ours_is_refused(engine: Engine) -> None:
    state = ask(engine, "hello", return_state=True).end.state
    saved = bytearray(states.to_bytes(state))
    like = engine.backend.empty_memory()
    for at in (4, 100, len(saved) // 2, len(saved) - 1):
        altered = bytearray(saved)
        altered[at] ^= 1
        with pytest.raises(UserError):
            states.from_bytes(bytes(altered), like, engine.fingerprint)
    for n in (0, 7, 200, len(saved) - 1):
        with pytest.raises(UserError):
            states.from_bytes(bytes(saved[:n]), like, engine.fingerprint)
    with pytest.raises(UserError, match="another model"):
        states.from_bytes(bytes(saved), like, "0" * 64)
    with pytest.raises(UserError, match="another model"):
        engine.submit(request(state=dataclasses.replace(state, model="0" * 64)), print)


def test_rules_of_a_request(engine: Engine) -> None:
    allowed = frozenset({70, 80, 90})
    assert set(ask(engine, max_tokens=30, allowed=allowed).tokens) <= allowed
    assert not set(ask(engine, max_tokens=200, banned=frozenset(range(3, 200))).tokens) & set(range(3, 200))
    assert set(ask(engine, max_tokens=20, logit_bias={77: 100.0}).tokens) == {77}
    assert 77 not in ask(engine, max_tokens=20, allowed=frozenset({77, 78}), logit_bias={77: -100.0}).tokens
    often = ask(engine, max_tokens=60, temperature=0.0).tokens
    seldom = ask(engine, max_tokens=60, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0).tokens
    assert len(set(seldom)) > len(set(often))


def test_it_ends_for_the_reason_told(engine: Engine) -> None:
    answer = ask(engine, seed=1, max_tokens=60)
    text = bytes(t - 3 for t in answer.tokens if t >= 3)
    token = answer.tokens[5]
    stopped = ask(engine, seed=1, max_tokens=60, stop_ids=frozenset({token}))
    first = answer.tokens.index(token)
    assert stopped.tokens == answer.tokens[: first + 1]
    assert (stopped.end.reason, stopped.end.stopped_by) == ("stop", token)
    late = ask(engine, seed=1, max_tokens=60, stop_ids=frozenset({token}), min_tokens=20)
    assert token not in late.tokens[:19]
    assert len(late.tokens) >= 20
    letters = re.sub(rb"[^ -~]", b"", text)
    if letters:
        stop = letters[:1].decode()
        by_text = ask(engine, seed=1, max_tokens=60, stop=(stop,))
        assert (by_text.end.reason, by_text.end.stopped_by) == ("stop", stop)
        assert stop not in by_text.text
    end = ask(engine, seed=1, max_tokens=60, ignore_end=False, logit_bias={1: 100.0})
    assert (end.end.reason, end.end.stopped_by, end.tokens) == ("stop", 1, [1])
    asked = Asked(
        engine, request("", seed=1, max_tokens=9, allowed=frozenset({70}), stop_ids=frozenset({70}), min_tokens=0)
    )
    event = next(e for e in iter(asked.events.get, None) if isinstance(e, Produced))
    assert event.offsets == (0,)


def test_top_logprobs_are_the_likeliest(engine: Engine) -> None:
    answer = ask(engine, "abc", temperature=0.0, top_logprobs=4)
    for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.top, strict=True):
        assert len(top) == 4
        assert (top[0].token, top[0].logprob) == (token, pytest.approx(logprob, abs=1e-6))
        assert [c.logprob for c in top] == sorted((c.logprob for c in top), reverse=True)


def test_prompt_logprobs_are_those_of_the_model(engine: Engine) -> None:
    asked = request("x" * 40 + "abcdefg" * 30, prompt_logprobs=True)
    answer = Asked(engine, asked).answer()
    assert answer.read is not None
    logprobs = answer.read.logprobs
    assert logprobs is not None
    assert len(logprobs) == len(asked.prompt)
    tokens = np.array([[1, *asked.prompt[:-1]]], np.int32)
    from linnet.data.batch import Batch

    batch = Batch(
        inputs=tokens,
        targets=np.array([asked.prompt], np.int32),
        doc_ids=np.zeros_like(tokens),
        loss_mask=np.ones(tokens.shape, np.float32),
    )
    want, _ = FAMILY.nats(PARAMS, BUFFERS, FAMILY.empty_carry(CFG, 1), batch, CFG)
    np.testing.assert_allclose(logprobs, -np.asarray(want)[0], rtol=1e-4, atol=1e-5)
    assert answer.tokens == plain(asked)[0]


def test_a_grammar_is_obeyed(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = Constraint(kind="json_schema", grammar=json.dumps(schema))
    for seed in range(4):
        answer = ask(engine, seed=seed, max_tokens=400, constraint=constraint, ignore_end=False)
        if answer.end.reason == "stop":
            assert isinstance(json.loads(answer.text)["a"], int)
    answer = ask(
        engine, seed=3, max_tokens=50, constraint=Constraint(kind="regex", grammar="(ab|cd){5}"), ignore_end=False
    )
    assert re.fullmatch("(ab|cd){5}", answer.text)
    assert answer.end.reason == "stop"
    with pytest.raises(UserError):
        ask(engine, constraint=Constraint(kind="regex", grammar="(("))
    stuck = ask(engine, constraint=Constraint(kind="regex", grammar="a+b"), banned=frozenset({ord("a") + 3}))
    assert stuck.end.reason == "error"


def test_cancel_and_deadline_end_it_and_free_the_slot(engine: Engine) -> None:
    asked = Asked(engine, request("x", max_tokens=10**6))
    engine.cancel(asked.request.id)
    assert asked.answer().end.reason == "cancelled"
    late = Asked(engine, request("x", max_tokens=10**6, deadline=engine.clock() + 0.2))
    assert late.answer().end.reason == "deadline"
    assert ask(engine, "still there").end.reason == "length"
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["parked"] == stats["reading"] == 0


def test_long_ones_make_room_and_stay_the_same() -> None:
    """More long requests than slots: they are parked and go on elsewhere, with the same bits."""
    engine = make(n_slots=2)
    try:
        requests = [request(f"{i}", seed=i, max_tokens=700) for i in range(4)]
        asked = [Asked(engine, one) for one in requests]
        urgent = request("now", seed=77, max_tokens=10, priority=5)
        assert Asked(engine, urgent).answer().tokens == plain(urgent)[0]
        for one, waiting in zip(requests, asked, strict=True):
            assert waiting.answer().tokens == plain(one)[0]
    finally:
        engine.stop(within=5)


def test_bounds_are_kept(engine: Engine) -> None:
    small = make(n_slots=1, max_waiting=2)
    try:
        running = [Asked(small, request("x", max_tokens=10**6)) for _ in range(2)]
        with pytest.raises(QueueFull):
            running += [Asked(small, request("x", max_tokens=10**6)) for _ in range(8)]
        for one in running:
            small.cancel(one.request.id)
        assert all(one.answer().end.reason == "cancelled" for one in running)
    finally:
        small.stop(within=5)
    with pytest.raises(UserError, match="a token id is 259"):
        engine.submit(Request(id="bad", prompt=(259,), sampling=Sampling()), print)
    too_long = Request(id="long", prompt=(5,) * (engine.config.max_prompt + 1), sampling=Sampling())
    with pytest.raises(UserError, match="the prompt is"):
        engine.submit(too_long, print)


def test_a_failed_batch_fails_its_requests_and_the_engine_lives(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = engine.backend.dispatch, threading.Semaphore(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if left.acquire(blocking=False):
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(engine.backend, "dispatch", fails)
    answer = ask(engine, "x")
    assert answer.end.reason == "error"
    assert "out of memory" in (answer.end.error or "")
    one = request("x", seed=4)
    assert Asked(engine, one).answer().tokens == plain(one)[0]


def test_stopping_lets_what_runs_finish() -> None:
    engine = make()
    asked = [Asked(engine, request("x", seed=i, max_tokens=50)) for i in range(5)]
    assert engine.stop(within=60)
    assert all(one.answer().end.reason == "length" for one in asked)
    with pytest.raises(UserError, match="about to stop"):
        engine.submit(request("x"), print)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("max_tokens", 10**12),
        ("min_tokens", 13),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", ("\ud800",)),
        ("stop", tuple("abcdefghijklmnopqrstuvwxyz")),
        ("logit_bias", {5: 1e9}),
        ("allowed", frozenset()),
        ("top_logprobs", 10**9),
    ],
)
def test_bad_settings_are_refused_when_made(field: str, value: Any) -> None:
    with pytest.raises(UserError):
        Sampling(**{"max_tokens": 12, field: value})
