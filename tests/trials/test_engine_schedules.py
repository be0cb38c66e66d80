"""Requests that come, go, fork, share, are saved and restored, overtake and run late, and batches that fail, at random: whoever
finishes has the bits of a solo run, whoever does not has a beginning of them, and the engine is empty when all is done."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_requests import Answer, PendingRequest, running_engine
from engine_trials import result, sampling, solo

from linnet.serve.engine import Engine
from linnet.serve.request import QueueFull, Request
from linnet.serve.sessions import MemorySessions
from linnet.serve.state import State

pytestmark = pytest.mark.optimized

SECONDS = float(os.environ.get("LINNET_SCHEDULE_SECONDS", "600"))
N_CLIENTS = 6
STEPS = ("prefill_chunk", "set_sampling", "first_token", "load", "save", "dispatch")


@dataclasses.dataclass(eq=False)
class Turn:
    """One request of a conversation; `before` is the turn it continues from."""

    request: Request
    before: Turn | None
    answer: Answer
    alone: Answer | None = None


class Client:
    """Does one random thing after the other. What it did is kept, for the replay."""

    def __init__(self, engine: Engine, sessions: MemorySessions, seed: int, beginnings: list[tuple[int, ...]]) -> None:
        self.draw, self.engine, self.sessions, self.beginnings = random.Random(seed), engine, sessions, beginnings
        self.turns: list[Turn] = []
        self.n_asked = 0
        self.name = f"client-{seed}"

    def act(self) -> None:
        """Up to four requests at once, each from nothing or from an earlier turn (several may share one: a fork)."""
        told = [turn for turn in self.turns if turn.answer.end.state is not None]
        asked = []
        for _ in range(self.draw.randint(1, 4)):
            before = self.draw.choice(told) if told and self.draw.random() < 0.4 else None
            request = self.request(before)
            try:
                asked.append((before, PendingRequest(self.engine, request)))
            except QueueFull:
                time.sleep(0.005)
        for before, one in asked:
            if self.draw.random() < 0.15:
                time.sleep(self.draw.random() * 0.05)
                self.engine.cancel(one.request.id)
            self.turns.append(Turn(one.request, before, one.answer(timeout=120)))

    def request(self, before: Turn | None) -> Request:
        draw = self.draw
        self.n_asked += 1
        own = tuple(draw.randrange(259) for _ in range(draw.choice([0, 1, 5, 130])))
        shared = draw.choice(self.beginnings)[: draw.choice([0, 128, 300, 600])] if before is None else ()
        late = draw.random() < 0.1
        return Request(
            id=f"{self.name}-{self.n_asked}",
            prompt=shared + own,
            sampling=sampling(draw, max_tokens=draw.choice([1, 7, 8, 9, 30, 120, 700])),
            priority=draw.choice([0, 0, 0, 1, 3]),
            deadline=self.engine.clock() + draw.random() * 0.2 if late else None,
            state=None if before is None else self.moved(before.answer.end.state),
            return_state=draw.random() < 0.5,
            prompt_logprobs=draw.random() < 0.1,
            use_prefix_cache=draw.random() < 0.9,
        )

    def moved(self, state: State) -> State:
        """As it is, or by way of a session, a fork of it, and a file."""
        if self.draw.random() < 0.5:
            return state
        first = self.sessions.create()
        self.sessions.put(first, state, state.n_tokens - 1)
        second = self.sessions.fork(first)
        third = self.sessions.restore(self.sessions.save(second))
        found = self.sessions.get(third).state
        for id in (first, second, third):
            self.sessions.delete(id)
        assert found is not None
        return found


def failing(real: Callable[..., Any], draw: random.Random, is_on: threading.Event) -> Callable[..., Any]:
    """Fails once in a while, before or after it was done."""

    def step(*args: Any, **kwargs: Any) -> Any:
        chance = draw.random() if is_on.is_set() else 1.0
        if chance < 0.0005:
            raise RuntimeError("failed before")
        done = real(*args, **kwargs)
        if chance < 0.001:
            raise RuntimeError("failed after")
        return done

    return step


def replay(turn: Turn, n_slots: int) -> Answer:
    """Alone, from the state that its conversation has alone."""
    if turn.alone is None:
        state = None if turn.before is None else replay(turn.before, n_slots).end.state
        turn.alone = solo(dataclasses.replace(turn.request, state=state), n_slots=n_slots)
    return turn.alone


def check(turn: Turn, solo_slots: int) -> None:
    told, alone = result(turn.answer), result(replay(turn, solo_slots))
    if turn.answer.end.reason in ("cancelled", "deadline") or turn.answer.end.error in (
        "failed before",
        "failed after",
    ):
        for name in ("tokens", "logprobs", "top", "text"):
            assert told[name] == alone[name][: len(told[name])], (turn.request.id, name)
    else:
        assert told == alone, turn.request.id


def round_of(seed: int, n_acts: int) -> list[Turn]:
    """All clients at work on one engine, until nothing is left to do; gives what was done."""
    draw, fails = random.Random(seed), threading.Event()
    beginnings = [tuple(draw.randrange(3, 259) for _ in range(600)) for _ in range(3)]
    # Room for few beginnings in the cache, and few places to wait in: both are often full.
    with running_engine(n_slots=3, max_waiting=8, prefix_bytes=1 << 16) as engine:
        for step in STEPS:
            setattr(engine.backend, step, failing(getattr(engine.backend, step), random.Random(draw.random()), fails))
        sessions = MemorySessions(engine.backend.abstract_state, engine.fingerprint)
        clients = [Client(engine, sessions, seed * N_CLIENTS + i, beginnings) for i in range(N_CLIENTS)]
        errors: list[BaseException] = []

        def run(client: Client) -> None:
            try:
                for _ in range(n_acts):
                    client.act()
            except BaseException as error:
                errors.append(error)

        if seed % 2:
            fails.set()
        threads = [threading.Thread(target=run, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        stats = engine.stats()
        assert (stats["waiting"], stats["reading"], stats["running"], stats["parked"]) == (0, 0, 0, 0)
        assert len(sessions) == 0
    return [turn for client in clients for turn in client.turns]


@pytest.mark.parametrize(
    ("seconds", "n_acts", "solo_slots"),
    [(0.0, 3, 3), pytest.param(SECONDS, 20, 1, marks=pytest.mark.trial)],
    ids=["quick", "full"],
)
def test_random_schedules_change_no_bit(
    seconds: float, n_acts: int, solo_slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds without and with batches that fail, in turn: two at least, and more until the time is over."""
    caplog.set_level("CRITICAL", logger="linnet.serve")
    ends: dict[str, int] = {}
    until, seed = time.monotonic() + seconds, 0
    while seed < 2 or time.monotonic() < until:
        for turn in round_of(seed, n_acts):
            check(turn, solo_slots)
            ends[turn.answer.end.reason] = ends.get(turn.answer.end.reason, 0) + 1
        seed += 1
    print(f"{seed} rounds, {sum(ends.values())} requests: {ends}")
    assert {"length", "stop", "cancelled"} <= ends.keys()
