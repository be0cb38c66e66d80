"""The scheduler's decisions, one at a time, on hand-made schedules."""

from __future__ import annotations

import pytest
from scheduler_backend import Backend

from linnet.serve.request import QueueFull
from linnet.serve.scheduler import Plan, Scheduler


def test_single_request_is_prefilled_and_runs_in_the_first_plan() -> None:
    backend = Backend(8)
    backend.submit("a", n_chunks=1, n_tokens=2)
    assert backend.step() == Plan(ended=(), free=(), preempt=(), prefill="a", load=(("a", 0),), tick=True)
    assert backend.step() == Plan(ended=(), free=(), preempt=(), prefill=None, load=(), tick=True)
    assert backend.step() == Plan(ended=(), free=(0,), preempt=(), prefill=None, load=(), tick=False)
    backend.run()


def test_queue_limit_counts_only_waiting_requests() -> None:
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


def test_duplicate_id_is_an_assertion_error() -> None:
    backend = Backend()
    backend.submit("a")
    with pytest.raises(AssertionError):
        backend.submit("a")


def test_updates_for_unknown_or_ended_requests_are_ignored() -> None:
    backend = Backend()
    backend.scheduler.cancel("nobody")
    backend.scheduler.ticked("nobody", 1)
    backend.scheduler.shorten("nobody", 0)
    backend.submit("a")
    backend.run()
    backend.scheduler.cancel("a")
    assert backend.scheduler.is_idle


@pytest.mark.parametrize("why", ["cancelled", "deadline", "error"])
def test_cancel_and_deadline_take_effect_in_the_next_plan_in_every_state(why: str) -> None:
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
    assert (scheduler.preempted, scheduler.running, scheduler.ready, scheduler.prefilling, scheduler.waiting) == (
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


def test_slot_freed_by_cancel_is_filled_in_the_same_plan() -> None:
    backend = Backend(1)
    backend.submit("a", n_tokens=100)
    backend.step()
    backend.submit("b", priority=-1)
    backend.step()
    backend.cancel("a")
    plan = backend.step()
    assert plan.ended == (("a", "cancelled"),)
    assert plan.free == (0,)
    assert plan.load == (("b", 0),)
    backend.run()


def test_finish_takes_precedence_over_cancel_and_cancel_over_deadline() -> None:
    backend = Backend()
    backend.submit("a", deadline=0.0)
    backend.submit("b", deadline=0.0)
    backend.cancel("a")
    backend.cancel("b")
    backend.fail("b")
    assert backend.step().ended == (("a", "cancelled"),)
    assert backend.how == {"a": "cancelled", "b": "error"}


def test_equal_priorities_are_first_come_first_served() -> None:
    backend = Backend(3, quantum=1000)
    ids = [f"r{i}" for i in range(20)]
    for id in ids:
        backend.submit(id, n_chunks=2, n_tokens=7)
    backend.run()
    assert backend.loaded == backend.finished == ids
    assert not backend.preempted


def test_higher_priority_goes_first() -> None:
    backend = Backend(1, quantum=1000)
    backend.submit("now", n_tokens=5, priority=9)
    backend.step()
    for i, priority in enumerate([0, 2, 1, 2, 0]):
        backend.submit(f"{priority}{i}", priority=priority)
    backend.run()
    assert backend.finished == ["now", "21", "23", "12", "00", "04"]


def test_higher_priority_preempts_the_lowest_and_latest_after_its_first_tick() -> None:
    backend = Backend(3, quantum=1000)
    backend.submit("mid", n_chunks=0, n_tokens=50, priority=1)
    backend.submit("low", n_chunks=0, n_tokens=50)
    backend.submit("late", n_chunks=0, n_tokens=50)
    backend.step()
    backend.submit("high", n_chunks=0, n_tokens=5, priority=2)
    assert backend.step().preempt == (("late", 2),)
    backend.submit("higher", n_chunks=0, priority=3)
    assert backend.step().preempt == (("low", 1),)
    backend.run()
    assert backend.preempted == ["late", "low"]


def test_request_without_a_token_since_admission_is_not_preempted() -> None:
    scheduler = Scheduler(1, 8)
    scheduler.submit("a", priority=0, deadline=None, n_chunks=0, now=0.0)
    assert scheduler.plan(0.0).load == (("a", 0),)
    scheduler.submit("b", priority=5, deadline=None, n_chunks=0, now=0.0)
    assert scheduler.plan(0.0).preempt == ()
    scheduler.ticked("a", 1)
    assert scheduler.plan(0.0).preempt == (("a", 0),)


def test_lower_priority_never_preempts_a_higher_one() -> None:
    backend = Backend(1, quantum=2)
    backend.submit("high", n_tokens=50, priority=1)
    backend.step()
    for i in range(5):
        backend.submit(f"low{i}")
    backend.run()
    assert "high" not in backend.preempted
    assert backend.finished[0] == "high"


def test_equal_priorities_alternate_by_quantum() -> None:
    backend = Backend(1, quantum=4)
    for id in "abc":
        backend.submit(id, n_chunks=0, n_tokens=10)
    backend.run()
    assert "".join(backend.loaded) == "abcabcabc"
    assert "".join(backend.preempted) == "abcabc"


def test_long_requests_do_not_starve_short_ones() -> None:
    backend = Backend(2, quantum=8)
    for i in range(2):
        backend.submit(f"long{i}", n_tokens=10_000)
    for _ in range(20):
        backend.step()
    backend.submit("short", n_tokens=5)
    for _ in range(6):
        backend.step()
    assert backend.how == {"short": "stop"}


def test_single_long_request_is_never_preempted() -> None:
    backend = Backend(1, quantum=2)
    backend.submit("a", n_tokens=100)
    backend.run()
    assert backend.loaded == ["a"]


def test_aging_admits_the_lowest_priority_under_constant_load() -> None:
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


def test_request_furthest_beyond_its_quantum_is_preempted() -> None:
    backend = Backend(2, quantum=4)
    backend.submit("first", n_chunks=0, n_tokens=100)
    backend.step()
    backend.step()
    backend.submit("second", n_chunks=0, n_tokens=100)
    for _ in range(8):
        backend.step()
    backend.submit("new", n_chunks=0)
    assert backend.step().preempt == (("first", 0),)
    backend.run()


class Clocked:
    """A scheduler with one slot and a manual clock: one level per 10 seconds, a quantum of 5 tokens."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1, 8, quantum=5, age_seconds=10.0)

    def submit(self, id: str, now: float, priority: int = 0) -> None:
        self.scheduler.submit(id, priority=priority, deadline=None, n_chunks=0, now=now)

    def runs(self, now: float) -> str | None:
        """Return the request that is admitted now; it then generates a token."""
        loaded = [id for id, _ in self.scheduler.plan(now).load]
        for id in loaded:
            self.scheduler.ticked(id, 1)
        return loaded[0] if loaded else None


def test_priority_rises_by_one_per_age_seconds_of_waiting() -> None:
    clocked = Clocked()
    clocked.submit("high", 0.0, priority=2)
    clocked.submit("low", 0.0, priority=0)
    assert clocked.runs(0.0) == "high"
    assert clocked.runs(29.9) is None
    assert clocked.runs(30.0) == "low"


def test_age_is_kept_while_running_until_the_quantum_is_spent() -> None:
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


def test_preempted_before_its_quantum_keeps_age_and_position() -> None:
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


def test_late_tokens_of_a_preempted_request_do_not_count() -> None:
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
