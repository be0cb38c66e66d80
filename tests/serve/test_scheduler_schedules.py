"""The scheduler on random schedules by hypothesis; a fake backend checks every plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_backend import NEVER, Backend

from linnet.serve.request import QueueFull


@settings(max_examples=60, deadline=None)
@given(
    n_slots=st.integers(1, 4),
    quantum=st.integers(1, 8),
    age_seconds=st.sampled_from([2.0, 10.0, 40.0]),
    max_states=st.integers(2, 8),
    kinds=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12), st.integers(-2, 2)), min_size=1, max_size=8),
)
def test_no_request_starves_under_constant_arrivals(
    n_slots: int, quantum: int, age_seconds: float, max_states: int, kinds: list[tuple[int, int, int]]
) -> None:
    backend = Backend(n_slots, max_waiting=6, quantum=quantum, age_seconds=age_seconds, max_states=max_states)
    # In the system at once: at most n_slots + max_states + 6, each with at most 6 chunks (every 5th read at worst) and 12 ticks, and
    # five levels of priority that age must make good again after every quantum.
    bound = (n_slots + max_states + 6) * (6 * 5 + 12) + 5 * age_seconds * 12
    for i in range(600):
        if backend.scheduler.waiting < 6:
            n_chunks, n_tokens, priority = kinds[i % len(kinds)]
            backend.submit(f"r{i}", n_chunks, n_tokens, priority=priority)
        backend.step()
        oldest = min(backend.asked[id].submitted for id in backend.alive | {f"r{i}"} & backend.asked.keys())
        assert backend.now - oldest <= bound
    backend.run()


class AnySchedule(RuleBasedStateMachine):
    """Requests arrive, finish, are cancelled and time out in any order; `Backend` checks each step, `teardown` the end."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = Backend()

    @initialize(
        n_slots=st.integers(1, 3),
        quantum=st.integers(1, 6),
        age_seconds=st.sampled_from([4.0, NEVER]),
        max_states=st.none() | st.integers(2, 4),
        leaves=st.booleans(),
    )
    def start(self, n_slots: int, quantum: int, age_seconds: float, max_states: int | None, leaves: bool) -> None:
        self.backend = Backend(
            n_slots, max_waiting=5, quantum=quantum, age_seconds=age_seconds, max_states=max_states, leaves=leaves
        )

    @rule(
        n_chunks=st.integers(0, 9),
        n_tokens=st.integers(1, 12),
        priority=st.integers(-2, 2),
        patience=st.none() | st.integers(0, 20),
    )
    def submit(self, n_chunks: int, n_tokens: int, priority: int, patience: int | None) -> None:
        backend, id = self.backend, f"r{len(self.backend.asked)}"
        deadline = None if patience is None else backend.now + patience
        is_full = backend.scheduler.waiting == 5
        try:
            backend.submit(id, n_chunks, n_tokens, priority=priority, deadline=deadline)
            assert not is_full
        except QueueFull:
            assert is_full

    @precondition(lambda self: self.backend.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.backend.cancel(data.draw(st.sampled_from(sorted(self.backend.asked))))

    @precondition(lambda self: self.backend.alive)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.backend.fail(data.draw(st.sampled_from(sorted(self.backend.alive))))

    @rule(n=st.integers(1, 8))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.backend.step()

    @invariant()
    def idle_means_nobody_is_alive(self) -> None:
        backend = self.backend
        assert backend.scheduler.is_idle == (not backend.alive and not backend.to_clear)

    def teardown(self) -> None:
        self.backend.run(2000)


AnySchedule.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnySchedule = AnySchedule.TestCase
