"""Who is read, who runs, who steps aside: decided between ticks in plain Python, without a clock, threads or a device.

A request waits, is read chunk by chunk (it then holds a state but no slot), is ready, and runs in a slot until it ends or is parked.
One whose last tokens are on their way leaves its slot to another before they are told.
Its level is its priority, and one more for every `age_seconds` it has stood outside a slot. Higher levels go first, and among equals
those that came first. A running request keeps the level it was placed with until it has had its quantum; then its age is spent,
any equal takes its slot, and it goes to the back of the line.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from linnet.serve.request import QueueFull

RETRY_AFTER = 1.0
"""Seconds. A place in the queue is free as soon as one who waits begins to be read, long before a request ends."""

QUICK_CHUNKS = 4
"""So many chunks in a row may go to prompts shorter than the one whose turn it is, or one whole such prompt, whichever is less."""

_State = Literal["waiting", "reading", "ready", "running", "parked", "leaving"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do before the next tick, in this order."""

    ended: tuple[tuple[str, Literal["cancelled", "deadline"]], ...]
    """Tell their owners, and drop what they hold."""
    free: tuple[int, ...]
    """Clear these slots, whose requests have ended or left."""
    park: tuple[tuple[str, int], ...]
    """Take the state out of this slot and keep it."""
    read: str | None
    """Read one chunk of this prompt."""
    place: tuple[tuple[str, int], ...]
    """Put these into these slots: the prompt is read (its last chunk perhaps just now), or the state was parked."""
    tick: bool
    """Some slot runs."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    id: str
    priority: int
    deadline: float | None
    n_left: int
    """Chunks of the prompt still to be read."""
    ticket: int
    """Its place in the line."""
    since: float
    """When it last began to stand outside a slot."""
    waited: float = 0.0
    """Seconds outside a slot before `since`."""
    state: _State = "waiting"
    slot: int | None = None
    n_tokens: int = 0
    """Produced since it was placed."""
    is_cancelled: bool = False


class Scheduler:
    """The books of one engine.

    States outside slots (being read, ready or parked) take memory, so there are at most `max_held` of them. The upper half
    of this room is for requests that will find a slot: one is free, or they outrank a running one.
    """

    def __init__(
        self,
        n_slots: int,
        max_waiting: int,
        *,
        quantum: int = 512,
        age_seconds: float = 10.0,
        max_held: int | None = None,
    ) -> None:
        self._max_held = max(4, 2 * n_slots) if max_held is None else max_held
        assert min(n_slots, max_waiting, quantum, self._max_held - 1) >= 1
        assert age_seconds > 0
        self._max_waiting, self._quantum, self._age_seconds = max_waiting, quantum, age_seconds
        self._jobs: dict[str, _Job] = {}
        self._slots: list[_Job | None] = [None] * n_slots
        self._to_clear: list[int] = []
        self._n_tickets = 0
        self._quick_left = QUICK_CHUNKS

    # What the engine tells.

    def submit(self, id: str, *, priority: int, deadline: float | None, n_chunks: int, now: float) -> None:
        """Queues a request whose prompt takes `n_chunks` to read; with 0 it needs no reading. Its id must be new to the books."""
        assert id not in self._jobs, id
        assert n_chunks >= 0
        if self.waiting >= self._max_waiting:
            raise QueueFull(self.waiting, RETRY_AFTER)
        self._jobs[id] = _Job(id, priority, deadline, n_chunks, ticket=self._ticket(), since=now)

    def cancel(self, id: str) -> None:
        """The next plan ends it, whatever its state. An id that is not in the books has ended already: nothing to do."""
        if id in self._jobs:
            self._jobs[id].is_cancelled = True

    def shorten(self, id: str, n_chunks: int) -> None:
        """No more than `n_chunks` are left to read: another request has meanwhile brought the rest into the prefix cache."""
        job = self._jobs.get(id)
        if job is not None and job.n_left:
            job.n_left = min(job.n_left, n_chunks)

    def ticked(self, id: str, n_tokens: int) -> None:
        """A running request produced tokens. Late news, of one that has meanwhile been parked or has ended, does not count."""
        if id in self._jobs:
            self._jobs[id].n_tokens += n_tokens

    def leaves(self, id: str) -> None:
        """All tokens that a running request may have are under way: its slot is free for the next tick. It ends when they are told."""
        job = self._jobs[id]
        assert job.state == "running", job.state
        self._vacate(job)
        job.state = "leaving"

    def ended(self, id: str) -> None:
        """It finished by itself or failed, and was told so: no plan will name it again but for clearing its slot."""
        self._remove(self._jobs[id])

    # What the engine asks.

    @property
    def waiting(self) -> int:
        """Not yet begun. Who is cancelled gives up its place at once."""
        return sum(job.state == "waiting" and not job.is_cancelled for job in self._jobs.values())

    @property
    def reading(self) -> int:
        """Begun, with chunks to read."""
        return self._count("reading")

    @property
    def ready(self) -> int:
        """Read, and not yet in a slot."""
        return self._count("ready")

    @property
    def running(self) -> int:
        """In slots."""
        return self._count("running")

    @property
    def leaving(self) -> int:
        """Out of their slots, their last tokens not told yet."""
        return self._count("leaving")

    @property
    def parked(self) -> int:
        """Taken out of a slot, to go on later."""
        return self._count("parked")

    @property
    def wants_slots(self) -> bool:
        """Somebody who has none could use one."""
        return any(job.state not in ("running", "leaving") for job in self._jobs.values())

    def has_begun(self, id: str) -> bool:
        """It is being read, or was: there is a state of it."""
        return self._jobs[id].state != "waiting"

    @property
    def is_idle(self) -> bool:
        """There is nothing to plan."""
        return not self._jobs and not self._to_clear

    def plan(self, now: float) -> Plan:
        """What to do before the next tick. The books take it as done."""
        ended = self._end_from_outside(now)
        free, self._to_clear = tuple(self._to_clear), []
        read = self._read(now)
        park, place = self._fill_slots(now)
        return Plan(ended, free, park, read, place, tick=any(self._slots))

    # How it decides.

    def _end_from_outside(self, now: float) -> tuple[tuple[str, Literal["cancelled", "deadline"]], ...]:
        ended: list[tuple[str, Literal["cancelled", "deadline"]]] = []
        for job in list(self._jobs.values()):
            if job.is_cancelled:
                ended.append((job.id, "cancelled"))
            elif job.deadline is not None and now >= job.deadline:
                ended.append((job.id, "deadline"))
            else:
                continue
            self._remove(job)
        return tuple(ended)

    def _read(self, now: float) -> str | None:
        """Takes one chunk off the prompt whose turn it is. Those that need no reading become ready on the way."""
        while (choice := self._next_to_read(now)) is not None:
            job, is_first = choice
            if job.n_left == 0:
                job.state = "ready"
                continue
            job.n_left -= 1
            job.state = "reading" if job.n_left else "ready"
            if is_first:
                self._quick_left = QUICK_CHUNKS
            else:
                self._quick_left = self._quick_left - 1 if job.n_left else 0
            return job.id
        return None

    def _next_to_read(self, now: float) -> tuple[_Job, bool] | None:
        """The first in line and the quickest to read take turns, so that a long prompt goes on and yet holds up no short one.

        The quickest must have the first one's priority at least, by birth and not by age: a long prompt grows old while it is read.
        """
        rank = {job: self._rank(job, now) for job in self._jobs.values() if job.state in ("waiting", "reading")}
        readable = self._readable(rank, now)
        if not readable:
            return None
        first = min(readable, key=rank.__getitem__)
        quick = min(
            (job for job in readable if job.priority >= first.priority or job.n_left == 0),
            key=lambda job: (job.n_left, rank[job]),
        )
        if quick.n_left and self._quick_left == 0:
            return first, True
        return quick, quick is first

    def _readable(self, rank: dict[_Job, tuple[int, int]], now: float) -> list[_Job]:
        """Of the unread, those that have been begun, and those for whose states there is room."""
        if not rank:
            return []
        head = min(rank, key=rank.__getitem__)
        # The last place is kept for the head of the line; or else quick ones would take every place that falls free.
        kept = int(head.state == "waiting")
        full = self._max_held - sum(job.state in ("reading", "ready", "parked") for job in self._jobs.values())
        half = full - (self._max_held + 1) // 2
        lowest = None if None in self._slots else min(self._level(job, now) for job in self._running())

        def has_room(job: _Job) -> bool:
            room = full if lowest is None or -rank[job][0] > lowest else half
            return room > (0 if job is head else kept)

        return [job for job in rank if job.state == "reading" or has_room(job)]

    def _fill_slots(self, now: float) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """Who is parked and who is placed: free slots first, then those of running requests that must step aside."""
        line = [job for job in self._jobs.values() if job.state in ("ready", "parked")]
        line.sort(key=lambda job: self._rank(job, now))
        # One that has produced nothing since it was placed stays: every placing moves its request on.
        victims = sorted(
            (job for job in self._running() if job.n_tokens), key=lambda job: self._preemption_key(job, now)
        )
        open_slots = [i for i, job in enumerate(self._slots) if job is None]
        park: list[tuple[str, int]] = []
        place: list[tuple[str, int]] = []
        for job in line:
            if open_slots:
                slot = open_slots.pop(0)
            elif victims and self._preempts(job, victims[0], now):
                victim = victims.pop(0)
                slot = self._park(victim, now)
                park.append((victim.id, slot))
            else:
                break
            self._place(job, slot, now)
            place.append((job.id, slot))
        return tuple(park), tuple(place)

    def _preempts(self, job: _Job, running: _Job, now: float) -> bool:
        mine, other = self._level(job, now), self._level(running, now)
        return mine > other or (mine == other and self._is_spent(running))

    def _preemption_key(self, job: _Job, now: float) -> tuple[int, int, int]:
        """Sorts the running: the lowest level first, then who has had most beyond its quantum, then who came last."""
        return self._level(job, now), -job.n_tokens if self._is_spent(job) else 0, -job.ticket

    def _rank(self, job: _Job, now: float) -> tuple[int, int]:
        return -self._level(job, now), job.ticket

    def _level(self, job: _Job, now: float) -> int:
        if job.slot is None:
            waited = job.waited + now - job.since
        else:
            waited = 0.0 if self._is_spent(job) else job.waited
        return job.priority + int(waited // self._age_seconds)

    def _is_spent(self, job: _Job) -> bool:
        return job.n_tokens >= self._quantum

    # How the books change.

    def _place(self, job: _Job, slot: int, now: float) -> None:
        job.state, job.slot, job.n_tokens = "running", slot, 0
        job.waited += now - job.since
        self._slots[slot] = job

    def _park(self, job: _Job, now: float) -> int:
        """Takes it out of its slot, which the caller fills at once, and gives the slot."""
        assert job.slot is not None
        if self._is_spent(job):
            job.waited, job.ticket = 0.0, self._ticket()
        slot = job.slot
        job.state, job.slot, job.since = "parked", None, now
        return slot

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.id]
        self._vacate(job)

    def _vacate(self, job: _Job) -> None:
        if job.slot is not None:
            self._slots[job.slot] = None
            self._to_clear.append(job.slot)
            job.slot = None

    def _ticket(self) -> int:
        self._n_tickets += 1
        return self._n_tickets

    def _running(self) -> list[_Job]:
        return [job for job in self._slots if job is not None]

    def _count(self, state: _State) -> int:
        return sum(job.state == state for job in self._jobs.values())
