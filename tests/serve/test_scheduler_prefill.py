"""Prefill order: long prompts progress without delaying short ones, and states outside slots are bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_backend import Backend

from linnet.serve.scheduler import QUICK_CHUNKS, Plan, Scheduler


def test_request_without_prefill_is_admitted_immediately() -> None:
    backend = Backend(4)
    for id in "abc":
        backend.submit(id, n_chunks=0)
    backend.submit("d", n_chunks=1)
    plan = backend.step()
    assert [id for id, _ in plan.load] == ["a", "b", "c", "d"]
    assert plan.prefill == "d"
    backend.run()


@settings(deadline=None)
@given(n_short=st.integers(1, 2 * QUICK_CHUNKS), start=st.integers(0, 30), priority=st.integers(0, 3))
def test_long_prompt_delays_neither_running_nor_short_requests(n_short: int, start: int, priority: int) -> None:
    backend = Backend(4, age_seconds=3.0)
    backend.submit("running", n_tokens=10_000)
    backend.step()
    backend.submit("long", n_chunks=800)
    for _ in range(start):
        assert backend.step().tick
    backend.submit("short", n_chunks=n_short, n_tokens=1, priority=priority)
    for _ in range(n_short + 2):
        assert backend.step().tick
    assert backend.how == {"short": "stop"}


@pytest.mark.parametrize("n_chunks", [1, 3, 100])
def test_long_prompt_progresses_under_many_short_ones(n_chunks: int) -> None:
    backend = Backend(4, max_waiting=8, max_states=8)
    backend.submit("long", n_chunks=200)
    backend.step()
    for i in range(200 * (QUICK_CHUNKS + 1)):
        if backend.scheduler.waiting < 8:
            backend.submit(f"r{i}", n_chunks=n_chunks)
        backend.step()
    assert "long" in backend.how


def test_prefill_is_shortened_by_newly_cached_chunks() -> None:
    scheduler = Scheduler(4, 8)
    for id in "ab":
        scheduler.submit(id, priority=0, deadline=None, n_chunks=3, now=0.0)
    scheduler.shorten("a", 5)
    assert [scheduler.plan(0.0).prefill for _ in range(4)] == ["a", "a", "a", "b"]
    scheduler.shorten("b", 0)
    assert scheduler.plan(0.0) == Plan(ended=(), free=(), preempt=(), prefill=None, load=(("b", 1),), tick=True)


def test_high_priority_is_admitted_beside_states_of_lower_ones() -> None:
    backend = Backend(1, max_waiting=32, quantum=1000, max_states=4)
    for i in range(20):
        backend.submit(f"low{i}", n_tokens=500)
    for _ in range(50):
        backend.step()
    assert backend.scheduler.ready == 2
    backend.submit("high", priority=1)
    backend.step()
    assert backend.how == {"high": "stop"}
    backend.run(20_000)


def test_high_priority_prompt_is_not_delayed_by_short_low_priority_ones() -> None:
    backend = Backend(4)
    backend.submit("low", n_chunks=1)
    backend.submit("high", n_chunks=50, priority=1)
    backend.submit("free", n_chunks=0)
    plan = backend.step()
    assert plan.load == (("free", 0),), "what needs no reading holds up nobody"
    backend.run()
    assert backend.reads == ["high"] * 50 + ["low"]


def test_head_of_the_queue_gets_every_second_chunk() -> None:
    backend = Backend(4)
    backend.submit("long", n_chunks=100)
    for i in range(10):
        backend.submit(f"r{i}")
    for _ in range(20):
        backend.step()
    assert backend.reads[::2] == [f"r{i}" for i in range(10)]
    assert backend.reads[1::2] == ["long"] * 10


def test_last_state_capacity_is_reserved_for_the_head_of_the_queue() -> None:
    backend = Backend(1, quantum=1000, max_states=2)
    backend.submit("running", n_tokens=4)
    backend.submit("ready", n_tokens=100)
    backend.submit("long", n_chunks=3)
    backend.submit("quick", n_chunks=1)
    for _ in range(5):
        backend.step()
    assert backend.reads == ["running", "ready", "long"]
    backend.run()


def test_full_state_capacity_is_available_while_a_slot_is_free() -> None:
    backend = Backend(1, max_states=2)
    backend.submit("long", n_chunks=20)
    backend.step()
    backend.submit("short")
    assert backend.step().load == (("short", 0),)
    backend.run()
