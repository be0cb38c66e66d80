"""What every engine is, whatever it computes: one thread that plans, carries out and tells, with a queue before it and an end to
everything.

A request that was taken ends exactly once, whatever happens: by itself, by cancel, deadline, failure, or the engine's stop.
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
    """Of a request: what the queue needs to know."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """Higher goes first."""
        ...

    @property
    def deadline(self) -> float | None:
        """On the engine's clock."""
        ...


class Job(Protocol):
    """One request on its way through."""

    @property
    def request(self) -> RequestInfo: ...
    @property
    def finish(self) -> Callable[..., None]:
        """Takes the reason, and whatever else there is to tell its owner."""
        ...


J = TypeVar("J", bound=Job)


class EngineLoop(abc.ABC, Generic[J]):
    def __init__(self, n_slots: int, max_waiting: int, clock: Callable[[], float], name: str) -> None:
        self.clock = clock
        self._scheduler = Scheduler(n_slots, max_waiting)
        self._jobs: dict[str, J] = {}
        self._flight: Any = None
        """What was started and not read back yet."""
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
        """Takes nothing new, lets what runs finish within so many seconds, then ends the rest. True: all had finished."""
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
        """It waits from here on; or is refused, if there is no room or the engine is about to stop."""
        with self._changed:
            if self._draining:
                raise Draining("the server is about to stop. Fix: try another one, or try again later.")
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
        """After a failure, whatever the device holds means nothing."""

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
                log.exception("a batch failed")
                self._fail_batch(str(error))

    def _end(self, job: J, reason: FinishReason, **told: Any) -> None:
        with self._changed:
            self._scheduler.ended(job.request.id)
            del self._jobs[job.request.id]
        job.finish(reason, **told)

    def _fail_batch(self, error: str) -> None:
        """Whatever had begun is lost: what it wrote may not have been told, or its place not have been taken. Who waits goes on."""
        self._flight = None
        with self._changed:
            lost = [job for id, job in self._jobs.items() if self._scheduler.has_begun(id)]
        for job in lost:
            self._end(job, "error", error=error)
        self._reset()
