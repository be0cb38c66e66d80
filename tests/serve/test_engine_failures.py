"""Failures in the engine affect only the requests that cause them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine_requests import CFG, PendingRequest, ask, plain, request, running_engine

from linnet.core.errors import UserError
from linnet.nn.sampling_bounds import MIN_TEMPERATURE
from linnet.serve.engine import Engine
from linnet.serve.grammar import Matcher
from linnet.serve.request import Constraint


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


@pytest.mark.parametrize(("step", "nth"), [("save", 3), ("load", 4)])
def test_device_failure_loses_no_tokens_of_surviving_requests(
    step: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted request has tokens in flight, and its successor is not in a slot yet: neither may be lost."""
    with running_engine(n_slots=1) as engine:
        real, calls = getattr(engine.backend, step), itertools.count(1)

        def fails(*args: Any) -> Any:
            if next(calls) == nth:
                raise RuntimeError("out of memory")
            return real(*args)

        monkeypatch.setattr(engine.backend, step, fails)
        # Each has its turn; then the third makes room for the first.
        slow = [PendingRequest(engine, request(f"{i}", seed=i, max_tokens=700)) for i in range(3)]
        answers = [one.answer() for one in slow]
        for one, answer in zip(slow, answers, strict=True):
            tokens, logprobs = plain(one.request)
            assert answer.tokens == tokens[: len(answer.tokens)]
            assert answer.logprobs == logprobs[: len(answer.logprobs)]
            assert (answer.end.reason == "length") == (len(answer.tokens) == 700)
        assert "error" in [answer.end.reason for answer in answers]


def test_waiting_request_with_a_state_survives_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(n_slots=1) as engine:
        state = ask(engine, "hello", return_state=True).end.state
        want = ask(engine, " more", state=state).tokens
        blocks = threading.Event()

        def fails(*args: Any, **kwargs: Any) -> Any:
            blocks.wait()
            monkeypatch.undo()
            raise RuntimeError("out of memory")

        monkeypatch.setattr(engine.backend, "dispatch", fails)
        lost = PendingRequest(engine, request("x"))
        while not engine.stats()["running"]:
            time.sleep(0.001)
        waits = PendingRequest(engine, request(" more", state=state))
        blocks.set()
        assert lost.answer().end.reason == "error"
        assert waits.answer().tokens == want


def test_request_can_be_submitted_while_jobs_are_iterated() -> None:
    comes, late, threads = threading.Event(), [], []

    class Books(dict[str, Any]):
        """A dict that lets another thread submit a request during every iteration, unless a lock prevents it."""

        def values(self) -> Any:
            for job in super().values():
                if not comes.is_set():
                    comes.set()
                    thread = threading.Thread(target=lambda: late.append(PendingRequest(engine, request("late"))))
                    thread.start()
                    threads.append(thread)
                    thread.join(0.3)  # time to come in between, unless the engine's lock keeps it out until later
                yield job

    with running_engine(n_slots=1) as engine:
        engine._jobs = Books()
        assert ask(engine, "first").end.reason == "length"
        assert comes.is_set()
        threads[0].join()
        assert late[0].answer().end.reason == "length"


def test_stuck_request_leaves_no_mask_in_its_slot() -> None:
    with running_engine(n_slots=1) as engine:
        one = request("x", seed=4)
        stuck = ask(engine, constraint=Constraint(kind="regex", grammar="a+b"), banned=frozenset({ord("a") + 3}))
        assert stuck.end.reason == "stuck"
        assert PendingRequest(engine, one).answer().tokens == plain(one)[0]


def test_failing_grammar_ends_only_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = request("x", seed=5, max_tokens=80)
    beside = PendingRequest(engine, neighbour)
    empty = Constraint(kind="regex", grammar="")
    assert ask(engine, constraint=empty, ignore_eos=False).end.reason == "stop"
    early = ask(engine, constraint=empty, ignore_eos=False, min_tokens=1)
    assert (early.tokens, early.end.reason) == ([], "stuck")
    assert "min_tokens" in (early.end.error or "")

    def too_much(matcher: Matcher, token: int) -> None:
        raise UserError("too much work")

    monkeypatch.setattr(Matcher, "advance", too_much)
    slow = ask(engine, constraint=Constraint(kind="regex", grammar="[a-z]+"))
    assert (slow.end.reason, slow.end.error) == ("stuck", "too much work")
    assert beside.answer().tokens == plain(neighbour)[0]


@pytest.mark.parametrize("rules", [{"allowed": frozenset({1, 70})}, {"banned": frozenset(range(259)) - {1, 70}}])
def test_forbidden_ids_are_never_sampled(engine: Engine, rules: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="min_tokens"):
        ask(engine, ignore_eos=False, min_tokens=2, stop_ids=frozenset({70}), **rules)
    assert ask(engine, ignore_eos=False, min_tokens=2, max_tokens=2, **rules).tokens == [70, 70]
    assert set(ask(engine, ignore_eos=False, stop_ids=frozenset({70}), **rules).tokens) <= {1, 70}


@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 100.0])
def test_extreme_settings_sample_valid_ids(engine: Engine, temperature: float, penalty: float) -> None:
    extremes = {"logit_bias": {5: 100.0, 6: 100.0, 7: -100.0}, "top_p": 1e-6, "typical_p": 1e-6, "min_p": 1.0}
    for name, value in extremes.items():
        rules: dict[str, Any] = {name: value, "temperature": temperature, "repetition_penalty": penalty}
        assert all(0 <= token < CFG.n_vocab for token in ask(engine, "x", **rules).tokens)


@pytest.mark.parametrize("temperature", [1e-7, 1e-37, 1e-45, 1e-300])
def test_too_small_temperature_is_rejected(temperature: float) -> None:
    with pytest.raises(UserError, match="greedy"):
        request("x", temperature=temperature)
