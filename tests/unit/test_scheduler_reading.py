"""Whose prompt is read next: long ones go on, hold up no short ones, and states outside slots stay few."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_backend import Backend

from linnet.serve.scheduler import QUICK_CHUNKS, Plan, Scheduler


def test_what_needs_no_reading_is_placed_at_once_beside_one_that_does() -> None:
    backend = Backend(4)
    for id in "abc":
        backend.submit(id, n_chunks=0)
    backend.submit("d", n_chunks=1)
    plan = backend.step()
    assert [id for id, _ in plan.place] == ["a", "b", "c", "d"]
    assert plan.read == "d"
    backend.run()


@settings(deadline=None)
@given(n_short=st.integers(1, 2 * QUICK_CHUNKS), start=st.integers(0, 30), priority=st.integers(0, 3))
def test_a_long_prompt_delays_neither_the_running_nor_a_short_newcomer(n_short: int, start: int, priority: int) -> None:
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
def test_a_long_prompt_goes_on_under_a_flood_of_shorter_ones(n_chunks: int) -> None:
    backend = Backend(4, max_waiting=8, max_held=8)
    backend.submit("long", n_chunks=200)
    backend.step()
    for i in range(200 * (QUICK_CHUNKS + 1)):
        if backend.scheduler.waiting < 8:
            backend.submit(f"r{i}", n_chunks=n_chunks)
        backend.step()
    assert "long" in backend.how


def test_a_prompt_is_shortened_by_what_another_brought_into_the_cache() -> None:
    scheduler = Scheduler(4, 8)
    for id in "ab":
        scheduler.submit(id, priority=0, deadline=None, n_chunks=3, now=0.0)
    scheduler.shorten("a", 5)
    assert [scheduler.plan(0.0).read for _ in range(4)] == ["a", "a", "a", "b"]
    scheduler.shorten("b", 0)
    assert scheduler.plan(0.0) == Plan(ended=(), free=(), park=(), read=None, place=(("b", 1),), tick=True)


def test_high_priority_finds_room_beside_held_states_of_lower_ones() -> None:
    backend = Backend(1, max_waiting=32, quantum=1000, max_held=4)
    for i in range(20):
        backend.submit(f"low{i}", n_tokens=500)
    for _ in range(50):
        backend.step()
    assert backend.scheduler.ready == 2
    backend.submit("high", priority=1)
    backend.step()
    assert backend.how == {"high": "stop"}
    backend.run(20_000)


def test_a_high_priority_prompt_is_not_held_up_by_short_ones_of_lower_priority() -> None:
    backend = Backend(4)
    backend.submit("low", n_chunks=1)
    backend.submit("high", n_chunks=50, priority=1)
    backend.submit("free", n_chunks=0)
    plan = backend.step()
    assert plan.place == (("free", 0),), "what needs no reading holds up nobody"
    backend.run()
    assert backend.reads == ["high"] * 50 + ["low"]


def test_the_first_in_line_gets_every_second_turn_beside_prompts_of_one_chunk() -> None:
    backend = Backend(4)
    backend.submit("long", n_chunks=100)
    for i in range(10):
        backend.submit(f"r{i}")
    for _ in range(20):
        backend.step()
    assert backend.reads[::2] == [f"r{i}" for i in range(10)]
    assert backend.reads[1::2] == ["long"] * 10


def test_the_last_place_for_a_state_is_kept_for_the_first_in_line() -> None:
    backend = Backend(1, quantum=1000, max_held=2)
    backend.submit("running", n_tokens=4)
    backend.submit("ready", n_tokens=100)
    backend.submit("long", n_chunks=3)
    backend.submit("quick", n_chunks=1)
    for _ in range(5):
        backend.step()
    assert backend.reads == ["running", "ready", "long"]
    backend.run()


def test_all_the_room_is_open_while_a_slot_is_free() -> None:
    backend = Backend(1, max_held=2)
    backend.submit("long", n_chunks=20)
    backend.step()
    backend.submit("short")
    assert backend.step().place == (("short", 0),)
    backend.run()
