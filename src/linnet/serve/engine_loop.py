"""Base class of the engines: a request queue, and one thread that plans, executes and emits events.

Every accepted request ends exactly once: by finishing, cancellation, its deadline, a failure, or the engine's stop.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from linnet.core.errors import invalid
from linnet.serve.request import Draining, FinishReason
from linnet.serve.scheduler import Plan, Scheduler

log = logging.getLogger("linnet.serve")


class RequestInfo(Protocol):
    """The fields of a request that the queue needs."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """Higher values are served first."""
        ...

    @property
    def deadline(self) -> float | None:
        """Time on the engine's clock."""
        ...


class Job(Protocol):
    """One request in the engine."""

    slot: int | None
    """The slot that it runs in; None: it waits, is preempted, or has released its slot."""
    slot_state: Any
    """The state that `EngineLoop._save` returned when it was preempted; None otherwise."""

    @property
    def request(self) -> RequestInfo: ...
    @property
    def finish(self) -> Callable[..., None]:
        """Takes the finish reason and the engine's own fields of the terminal event."""
        ...


class EngineBackend(Protocol):
    """The device side of an engine."""

    @property
    def state_bytes(self) -> int: ...
    def reset(self) -> None:
        """Discard all state on the device."""
        ...


J = TypeVar("J", bound=Job)
B = TypeVar("B", bound=EngineBackend)


class EngineLoop(abc.ABC, Generic[J, B]):
    def __init__(
        self, backend: B, fingerprint: str, *, n_slots: int, max_waiting: int, clock: Callable[[], float], name: str
    ) -> None:
        self.backend, self.fingerprint, self.clock = backend, fingerprint, clock
        self._scheduler = Scheduler(n_slots, max_waiting)
        self._jobs: dict[str, J] = {}
        self._flight: Any = None
        """Work that was dispatched and not read back yet."""
        self._changed = threading.Condition()
        self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # From any thread

    def start(self) -> Self:
        self._thread.start()
        return self

    def cancel(self, id: str) -> None:
        with self._changed:
            self._scheduler.cancel(id)
            self._changed.notify()

    def stop(self, *, within: float) -> bool:
        """Accept no new requests, let the current ones finish for up to `within` seconds, then cancel the rest. Returns True if all
        had finished."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        until = time.monotonic() + within
        while self._jobs and time.monotonic() < until:
            time.sleep(0.01)
        left = list(self._jobs)
        for id in left:
            self.cancel(id)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=30)
        return not left

    def _queue(self, job: J, n_chunks: int) -> None:
        """Add a job to the queue. Raises `QueueFull`, or `Draining` if the engine is about to stop."""
        with self._changed:
            if self._draining:
                raise Draining("the server is shutting down. Fix: use another server, or try again later.")
            request = job.request
            self._scheduler.submit(
                request.id,
                priority=request.priority,
                deadline=request.deadline,
                n_chunks=n_chunks,
                now=self.clock(),
            )
            self._jobs[request.id] = job
            self._changed.notify()

    # In the engine's thread

    @abc.abstractmethod
    def _save(self, job: J, slot: int) -> Any:
        """Return the state of a request that is preempted."""

    @abc.abstractmethod
    def _execute(self, plan: Plan) -> None:
        """Prefill, load and tick as planned. Ended requests are removed and preempted ones are saved before this."""

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._scheduler.is_idle and self._flight is None and not self._stopping:
                    self._changed.wait()
                if self._stopping and self._scheduler.is_idle:
                    break
                plan = self._scheduler.plan(self.clock())
            try:
                self._end_and_preempt(plan)
                self._execute(plan)
            except Exception as error:
                log.exception("A batch failed.")
                self._fail_batch(str(error))

    def _end_and_preempt(self, plan: Plan) -> None:
        for id, reason in plan.ended:
            self._jobs.pop(id).finish(reason)
        for id, slot in plan.preempt:
            job = self._jobs[id]
            job.slot_state, job.slot = self._save(job, slot), None

    def _running(self) -> dict[int, J]:
        """Return the jobs in slots, by slot."""
        with self._changed:  # other threads add jobs
            return {job.slot: job for job in self._jobs.values() if job.slot is not None}

    def _release_slot(self, job: J) -> None:
        """Release the slot of a job whose last tick is dispatched, without waiting for its result."""
        job.slot = None
        with self._changed:
            self._scheduler.release_slot(job.request.id)

    def _end(self, job: J, reason: FinishReason, **fields: Any) -> None:
        with self._changed:
            self._scheduler.ended(job.request.id)
            del self._jobs[job.request.id]
        job.finish(reason, **fields)

    def _fail_batch(self, error: str) -> None:
        """End every request that has started with an error, because its tokens or its slot may have been lost. Waiting requests
        stay in the queue."""
        self._flight = None
        with self._changed:
            lost = [job for id, job in self._jobs.items() if self._scheduler.has_begun(id)]
        for job in lost:
            self._end(job, "error", error=error)
        self.backend.reset()


def check_queue(n_slots: int, max_waiting: int) -> None:
    for name, value in (("--slots", n_slots), ("--queue", max_waiting)):
        if value < 1:
            raise invalid(name, value, "at least 1", "use the default")
