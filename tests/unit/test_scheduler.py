"""The scheduler's decisions one by one, on schedules made by hand."""

from __future__ import annotations

import pytest
from scheduler_backend import Backend

from linnet.serve.request import QueueFull
from linnet.serve.scheduler import Plan, Scheduler


def test_one_alone_is_read_and_runs_in_the_first_plan() -> None:
    backend = Backend(8)
    backend.submit("a", n_chunks=1, n_tokens=2)
    assert backend.step() == Plan(ended=(), free=(), park=(), read="a", place=(("a", 0),), tick=True)
    assert backend.step() == Plan(ended=(), free=(), park=(), read=None, place=(), tick=True)
    assert backend.step() == Plan(ended=(), free=(0,), park=(), read=None, place=(), tick=False)
    backend.run()


def test_queue_is_bounded_and_counts_only_who_waits() -> None:
    backend = Backend(1, max_waiting=2)
    backend.submit("a", n_tokens=100)
    backend.submit("b")
    with pytest.raises(QueueFull) as full:
        backend.submit("c")
    assert full.value.retry_after > 0
    backend.step()
    backend.submit("c")
    backend.cancel("c")
    backend.submit("d")
    with pytest.raises(QueueFull):
        backend.submit("e")
    backend.run()


def test_a_repeated_id_is_our_mistake() -> None:
    backend = Backend()
    backend.submit("a")
    with pytest.raises(AssertionError):
        backend.submit("a")


def test_unknown_and_late_news_is_ignored() -> None:
    backend = Backend()
    backend.scheduler.cancel("nobody")
    backend.scheduler.ticked("nobody", 1)
    backend.scheduler.shorten("nobody", 0)
    backend.submit("a")
    backend.run()
    backend.scheduler.cancel("a")
    assert backend.scheduler.is_idle


@pytest.mark.parametrize("why", ["cancelled", "deadline", "error"])
def test_ends_from_outside_in_every_state_within_one_plan(why: str) -> None:
    backend = Backend(1, quantum=2)
    deadline = 6.0 if why == "deadline" else None
    backend.submit("parked", n_tokens=100, deadline=deadline)
    backend.step()
    backend.step()
    backend.submit("running", n_tokens=100, priority=1, deadline=deadline)
    backend.step()
    backend.submit("ready", priority=0, deadline=deadline)
    backend.step()
    backend.submit("reading", n_chunks=100, priority=2, deadline=deadline)
    backend.step()
    backend.submit("waiting", n_chunks=100, deadline=deadline)
    scheduler = backend.scheduler
    assert (scheduler.parked, scheduler.running, scheduler.ready, scheduler.reading, scheduler.waiting) == (
        1,
        1,
        1,
        1,
        1,
    )
    while backend.now < 6.0:
        backend.step()
    for id in sorted(backend.alive):
        {"cancelled": backend.cancel, "error": backend.fail, "deadline": lambda id: None}[why](id)
    plan = backend.step()
    assert plan.free == (0,)
    assert set(backend.how.values()) == {why}
    assert len(backend.how) == 5
    backend.run()


def test_a_slot_freed_by_cancel_is_filled_in_the_same_plan() -> None:
    backend = Backend(1)
    backend.submit("a", n_tokens=100)
    backend.step()
    backend.submit("b", priority=-1)
    backend.step()
    backend.cancel("a")
    plan = backend.step()
    assert plan.ended == (("a", "cancelled"),)
    assert plan.free == (0,)
    assert plan.place == (("b", 0),)
    backend.run()


def test_cancel_goes_before_deadline_and_an_end_before_both() -> None:
    backend = Backend()
    backend.submit("a", deadline=0.0)
    backend.submit("b", deadline=0.0)
    backend.cancel("a")
    backend.cancel("b")
    backend.fail("b")
    assert backend.step().ended == (("a", "cancelled"),)
    assert backend.how == {"a": "cancelled", "b": "error"}


def test_first_come_first_served_among_equals() -> None:
    backend = Backend(3, quantum=1000)
    ids = [f"r{i}" for i in range(20)]
    for id in ids:
        backend.submit(id, n_chunks=2, n_tokens=7)
    backend.run()
    assert backend.placed == backend.finished == ids
    assert not backend.parked


def test_higher_priorities_go_first() -> None:
    backend = Backend(1, quantum=1000)
    backend.submit("now", n_tokens=5, priority=9)
    backend.step()
    for i, priority in enumerate([0, 2, 1, 2, 0]):
        backend.submit(f"{priority}{i}", priority=priority)
    backend.run()
    assert backend.finished == ["now", "21", "23", "12", "00", "04"]


def test_a_higher_priority_parks_the_lowest_and_the_latest_of_them_after_its_first_tick() -> None:
    backend = Backend(3, quantum=1000)
    backend.submit("mid", n_chunks=0, n_tokens=50, priority=1)
    backend.submit("low", n_chunks=0, n_tokens=50)
    backend.submit("late", n_chunks=0, n_tokens=50)
    backend.step()
    backend.submit("high", n_chunks=0, n_tokens=5, priority=2)
    assert backend.step().park == (("late", 2),)
    backend.submit("higher", n_chunks=0, priority=3)
    assert backend.step().park == (("low", 1),)
    backend.run()
    assert backend.parked == ["late", "low"]


def test_who_has_produced_nothing_since_it_was_placed_stays() -> None:
    scheduler = Scheduler(1, 8)
    scheduler.submit("a", priority=0, deadline=None, n_chunks=0, now=0.0)
    assert scheduler.plan(0.0).place == (("a", 0),)
    scheduler.submit("b", priority=5, deadline=None, n_chunks=0, now=0.0)
    assert scheduler.plan(0.0).park == ()
    scheduler.ticked("a", 1)
    assert scheduler.plan(0.0).park == (("a", 0),)


def test_a_lower_priority_never_parks_a_higher_one() -> None:
    backend = Backend(1, quantum=2)
    backend.submit("high", n_tokens=50, priority=1)
    backend.step()
    for i in range(5):
        backend.submit(f"low{i}")
    backend.run()
    assert "high" not in backend.parked
    assert backend.finished[0] == "high"


def test_equals_take_turns_by_quantum() -> None:
    backend = Backend(1, quantum=4)
    for id in "abc":
        backend.submit(id, n_chunks=0, n_tokens=10)
    backend.run()
    assert "".join(backend.placed) == "abcabcabc"
    assert "".join(backend.parked) == "abcabc"


def test_long_ones_do_not_starve_short_ones() -> None:
    backend = Backend(2, quantum=8)
    for i in range(2):
        backend.submit(f"long{i}", n_tokens=10_000)
    for _ in range(20):
        backend.step()
    backend.submit("short", n_tokens=5)
    for _ in range(6):
        backend.step()
    assert backend.how == {"short": "stop"}


def test_a_lone_long_one_is_never_parked() -> None:
    backend = Backend(1, quantum=2)
    backend.submit("a", n_tokens=100)
    backend.run()
    assert backend.placed == ["a"]


def test_age_lifts_the_lowest_over_an_endless_stream_of_higher_ones() -> None:
    backend = Backend(1, max_waiting=4, quantum=4, age_seconds=20.0)
    backend.submit("low", n_tokens=12, priority=-3)
    for i in range(1500):
        if backend.scheduler.waiting < 4:
            backend.submit(f"r{i}", n_tokens=3, priority=0)
        backend.step()
        if "low" in backend.how:
            break
    assert backend.now > 3 * 20, "the priority must count"
    assert backend.how["low"] == "stop"


def test_the_one_furthest_beyond_its_quantum_steps_aside() -> None:
    backend = Backend(2, quantum=4)
    backend.submit("first", n_chunks=0, n_tokens=100)
    backend.step()
    backend.step()
    backend.submit("second", n_chunks=0, n_tokens=100)
    for _ in range(8):
        backend.step()
    backend.submit("new", n_chunks=0)
    assert backend.step().park == (("first", 0),)
    backend.run()


class Clocked:
    """A scheduler of one slot on which tests set the clock: a level for every 10 seconds, a quantum of 5 tokens."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1, 8, quantum=5, age_seconds=10.0)

    def submit(self, id: str, now: float, priority: int = 0) -> None:
        self.scheduler.submit(id, priority=priority, deadline=None, n_chunks=0, now=now)

    def runs(self, now: float) -> str | None:
        """Who is placed now; it then produces a token."""
        placed = [id for id, _ in self.scheduler.plan(now).place]
        for id in placed:
            self.scheduler.ticked(id, 1)
        return placed[0] if placed else None


def test_who_waits_rises_by_one_priority_for_every_age() -> None:
    clocked = Clocked()
    clocked.submit("high", 0.0, priority=2)
    clocked.submit("low", 0.0, priority=0)
    assert clocked.runs(0.0) == "high"
    assert clocked.runs(29.9) is None
    assert clocked.runs(30.0) == "low"


def test_age_lasts_while_running_until_the_quantum_is_spent() -> None:
    clocked = Clocked()
    clocked.submit("high", 0.0, priority=2)
    clocked.submit("low", 0.0, priority=0)
    clocked.runs(0.0)
    assert clocked.runs(30.0) == "low"
    assert clocked.runs(31.0) is None, "high, of level 2, waits beside low of level 3"
    clocked.scheduler.ticked("low", 4)
    assert clocked.runs(32.0) == "high"
    assert clocked.runs(51.0) is None, "low has begun from 0 again"
    assert clocked.runs(62.0) == "low"


def test_who_is_parked_before_its_quantum_keeps_its_age_and_place_but_does_not_age_while_running() -> None:
    clocked = Clocked()
    clocked.submit("before", 0.0, priority=9)
    clocked.submit("old", 0.0)
    clocked.runs(0.0)
    clocked.scheduler.ended("before")
    assert clocked.runs(19.0) == "old", "of level 1"
    clocked.submit("high", 80.0, priority=2)
    assert clocked.runs(80.0) == "high", "of level 2 outranks it, though it ran for a minute"
    clocked.submit("even", 80.0, priority=2)
    clocked.scheduler.ended("high")
    assert clocked.runs(81.0) == "old", "19 and 1 seconds outside make level 2, and it came before even"


def test_news_of_one_that_was_parked_does_not_count_for_its_next_turn() -> None:
    clocked = Clocked()
    clocked.submit("a", 0.0)
    clocked.runs(0.0)
    clocked.submit("b", 0.0, priority=1)
    assert clocked.runs(0.0) == "b"
    clocked.scheduler.ticked("a", 5)
    clocked.scheduler.ended("b")
    assert clocked.runs(0.0) == "a"
    clocked.submit("c", 0.0)
    assert clocked.runs(0.0) is None
