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

    @property
    def request(self) -> RequestInfo: ...
    @property
    def finish(self) -> Callable[..., None]:
        """Takes the finish reason and the engine's own fields of the terminal event."""
        ...


J = TypeVar("J", bound=Job)


class EngineLoop(abc.ABC, Generic[J]):
    def __init__(self, n_slots: int, max_waiting: int, clock: Callable[[], float], name: str) -> None:
        self.clock = clock
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
    def _execute(self, plan: Plan) -> None: ...

    @abc.abstractmethod
    def _reset(self) -> None:
        """Discard all state on the device, after a failure."""

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._scheduler.is_idle and self._flight is None and not self._stopping:
                    self._changed.wait()
                if self._stopping and self._scheduler.is_idle:
                    break
                plan = self._scheduler.plan(self.clock())
            try:
                self._execute(plan)
            except Exception as error:
                log.exception("A batch failed.")
                self._fail_batch(str(error))

    def _end(self, job: J, reason: FinishReason, **told: Any) -> None:
        with self._changed:
            self._scheduler.ended(job.request.id)
            del self._jobs[job.request.id]
        job.finish(reason, **told)

    def _fail_batch(self, error: str) -> None:
        """End every request that has started with an error, because its tokens or its slot may have been lost. Waiting requests
        stay in the queue."""
        self._flight = None
        with self._changed:
            lost = [job for id, job in self._jobs.items() if self._scheduler.has_begun(id)]
        for job in lost:
            self._end(job, "error", error=error)
        self._reset()
