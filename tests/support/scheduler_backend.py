"""A fake backend that carries out the scheduler's plans as an engine would, and checks every one of them."""

from __future__ import annotations

import dataclasses

from linnet.serve.scheduler import Plan, Scheduler

NEVER = 1e9
"""As `age_seconds`: no one's level rises."""


@dataclasses.dataclass
class State:
    """What a request has on the device or beside it. It knows whose it is, so that a mix-up shows."""

    owner: str
    n_read: int = 0
    n_tokens: int = 0


@dataclasses.dataclass
class FakeRequest:
    n_chunks: int
    n_tokens: int
    priority: int
    deadline: float | None
    number: int
    submitted: float
    is_cancelled: bool = False


class Backend:
    """Does what plans say, as an engine would, and rejects what cannot be done. A step is a plan and a tick: one second."""

    def __init__(
        self,
        n_slots: int = 2,
        max_waiting: int = 64,
        *,
        quantum: int = 4,
        age_seconds: float = NEVER,
        max_states: int | None = None,
        leaves: bool = False,
    ) -> None:
        """`leaves`: the slot of a request in its last tick is given away before the tick is reported."""
        self.scheduler = Scheduler(
            n_slots, max_waiting, quantum=quantum, age_seconds=age_seconds, max_states=max_states
        )
        self.max_states = max(4, 2 * n_slots) if max_states is None else max_states
        self.ages = age_seconds < NEVER
        self.now = 0.0
        self.asked: dict[str, FakeRequest] = {}
        self.alive: set[str] = set()
        self.held: dict[str, State] = {}
        self.slots: list[State | None] = [None] * n_slots
        self.to_clear: set[int] = set()
        self.how: dict[str, str] = {}
        self.reads: list[str] = []
        self.loaded: list[str] = []
        self.preempted: list[str] = []
        self.finished: list[str] = []
        self.release_slot = leaves
        self.draining: list[str] = []

    def submit(
        self, id: str, n_chunks: int = 1, n_tokens: int = 1, *, priority: int = 0, deadline: float | None = None
    ) -> None:
        self.scheduler.submit(id, priority=priority, deadline=deadline, n_chunks=n_chunks, now=self.now)
        self.asked[id] = FakeRequest(n_chunks, n_tokens, priority, deadline, len(self.asked), self.now)
        self.alive.add(id)

    def cancel(self, id: str) -> None:
        self.scheduler.cancel(id)
        self.asked[id].is_cancelled = True

    def fail(self, id: str) -> None:
        self.scheduler.ended(id)
        self._end(id, "error")

    def step(self) -> Plan:
        plan = self.scheduler.plan(self.now)
        self._execute(plan)
        self._check(plan)
        self._tick()
        self.now += 1.0
        return plan

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.scheduler.is_idle:
                break
            self.step()
        assert self.scheduler.is_idle
        assert not self.alive
        assert not self.held
        assert self.slots == [None] * len(self.slots)
        counts = (
            self.scheduler.waiting,
            self.scheduler.prefilling,
            self.scheduler.ready,
            self.scheduler.running,
            self.scheduler.preempted,
        )
        assert counts == (0, 0, 0, 0, 0)
        assert self.scheduler.draining == 0
        assert self.how.keys() == self.asked.keys()

    def where(self, id: str) -> int | None:
        return next((i for i, state in enumerate(self.slots) if state is not None and state.owner == id), None)

    def _end(self, id: str, how: str) -> None:
        assert id in self.alive and id not in self.how, f"{id} ended twice"  # noqa: PT018
        self.alive.remove(id)
        self.how[id] = how
        self.held.pop(id, None)
        if (slot := self.where(id)) is not None and id not in self.draining:
            self.to_clear.add(slot)

    def _execute(self, plan: Plan) -> None:
        for id, how in plan.ended:
            asked = self.asked[id]
            overdue = asked.deadline is not None and self.now >= asked.deadline
            assert asked.is_cancelled if how == "cancelled" else overdue
            self._end(id, how)
        assert sorted(plan.free) == sorted(self.to_clear), "the slots of ended requests, each once"
        for i in plan.free:
            self.slots[i] = None
        self.to_clear = set()
        for id, i in plan.preempt:
            state = self.slots[i]
            assert state is not None
            assert state.owner == id
            assert id not in self.held
            self.held[id], self.slots[i] = state, None
            self.preempted.append(id)
        if plan.prefill is not None:
            assert plan.prefill in self.alive
            assert self.where(plan.prefill) is None
            state = self.held.setdefault(plan.prefill, State(plan.prefill))
            state.n_read += 1
            assert state.n_read <= self.asked[plan.prefill].n_chunks
            self.reads.append(plan.prefill)
        for id, i in plan.load:
            assert self.slots[i] is None, "no slot holds two"
            assert id in self.alive
            state = self.held.pop(id) if self.asked[id].n_chunks else self.held.pop(id, State(id))
            assert state.owner == id
            assert state.n_read == self.asked[id].n_chunks, "placed before its prompt was read"
            self._check_turn(id)
            self.slots[i] = state
            self.loaded.append(id)

    def _check(self, plan: Plan) -> None:
        scheduler = self.scheduler
        running = [state.owner for state in self.slots if state is not None]
        assert len(set(running)) == len(running) == scheduler.running
        assert plan.tick == bool(running)
        assert plan.tick or plan.prefill or self.draining or not self.alive, "something always moves"
        for id in self.alive:
            asked = self.asked[id]
            assert not asked.is_cancelled
            assert asked.deadline is None or self.now < asked.deadline
        n_outside = scheduler.prefilling + scheduler.ready + scheduler.preempted
        assert n_outside <= self.max_states
        assert scheduler.draining == len(self.alive.intersection(self.draining))
        assert scheduler.waiting + n_outside + scheduler.running + scheduler.draining == len(self.alive)
        assert self.held.keys() <= self.alive
        assert not (None in self.slots and scheduler.ready + scheduler.preempted), "no slot idles while one is ready"

        if not self.ages:
            outside = [self.asked[id].priority for id in self.held if self._is_placeable(id)]
            inside = [self.asked[id].priority for id in running]
            assert max(outside, default=-99) <= min(inside, default=99), (
                "a lower priority runs while a higher one is ready"
            )

    def _check_turn(self, id: str) -> None:
        """First come first served: no one older, of the same kind, still hopes for its first slot."""
        mine = self.asked[id]
        for other in self.alive - set(self.loaded) - {id}:
            asked = self.asked[other]
            if (asked.priority, asked.n_chunks) == (mine.priority, mine.n_chunks) and id not in self.loaded:
                assert asked.number > mine.number, f"{id} goes before {other}"

    def _is_placeable(self, id: str) -> bool:
        return self.held[id].n_read == self.asked[id].n_chunks

    def _tick(self) -> None:
        reported, self.draining = self.alive.intersection(self.draining), []
        for i, state in enumerate(self.slots):
            if state is None or i in self.to_clear:
                continue
            state.n_tokens += 1
            self.scheduler.ticked(state.owner, 1)
            if state.n_tokens < self.asked[state.owner].n_tokens:
                continue
            if self.release_slot:
                self.scheduler.release_slot(state.owner)
                self.draining.append(state.owner)
                self.to_clear.add(i)
            else:
                reported.add(state.owner)
        for id in reported:
            self.finished.append(id)
            self.scheduler.ended(id)
            self._end(id, "stop")
