"""How requests and the engine end: finish reasons, bounds, and released slots."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_requests import PendingRequest, ask, make, plain, request, running_engine

from linnet.core.errors import UserError
from linnet.serve.engine import Engine
from linnet.serve.request import QueueFull, Request, Sampling, TokensEvent


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def test_finish_reasons(engine: Engine) -> None:
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
    end = ask(engine, seed=1, max_tokens=60, ignore_eos=False, logit_bias={1: 100.0})
    assert (end.end.reason, end.end.stopped_by, end.tokens) == ("stop", 1, [1])
    requested = PendingRequest(
        engine, request("", seed=1, max_tokens=9, allowed=frozenset({70}), stop_ids=frozenset({70}), min_tokens=0)
    )
    event = next(e for e in iter(requested.events.get, None) if isinstance(e, TokensEvent))
    assert event.offsets == (0,)


def test_cancel_and_deadline_free_the_slot(engine: Engine) -> None:
    requested = PendingRequest(engine, request("x", max_tokens=10**6))
    engine.cancel(requested.request.id)
    assert requested.answer().end.reason == "cancelled"
    late = PendingRequest(engine, request("x", max_tokens=10**6, deadline=engine.clock() + 0.2))
    assert late.answer().end.reason == "deadline"
    assert ask(engine, "still there").end.reason == "length"
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["parked"] == stats["reading"] == 0


def test_bounds_are_enforced(engine: Engine) -> None:
    with running_engine(n_slots=1, max_waiting=2) as small:
        running = [PendingRequest(small, request("x", max_tokens=10**6)) for _ in range(2)]
        with pytest.raises(QueueFull):
            running += [PendingRequest(small, request("x", max_tokens=10**6)) for _ in range(8)]
        for one in running:
            small.cancel(one.request.id)
        assert all(one.answer().end.reason == "cancelled" for one in running)
    with pytest.raises(UserError, match="a token id is 259"):
        engine.submit(Request(id="bad", prompt=(259,), sampling=Sampling()), print)
    too_long = Request(id="long", prompt=(5,) * (engine.config.max_prompt + 1), sampling=Sampling())
    with pytest.raises(UserError, match="the prompt is"):
        engine.submit(too_long, print)


def test_failed_batch_fails_its_requests_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert PendingRequest(engine, one).answer().tokens == plain(one)[0]


def test_stop_lets_running_requests_finish() -> None:
    engine = make()
    requested = [PendingRequest(engine, request("x", seed=i, max_tokens=50)) for i in range(5)]
    assert engine.stop(within=60)
    assert all(one.answer().end.reason == "length" for one in requested)
    with pytest.raises(UserError, match="shutting down"):
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
def test_invalid_settings_are_rejected_on_construction(field: str, value: Any) -> None:
    with pytest.raises(UserError):
        Sampling(**{"max_tokens": 12, field: value})
