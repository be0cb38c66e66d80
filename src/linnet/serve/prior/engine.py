"""Prior engine: denoises requests at different steps, with different solvers and guidance, in one batch of slots.

The loop, the queue and the scheduling are those of the token engine (`EngineLoop`, `Scheduler`), with a step in place of a token.
There is no chunked prefill (a text is one short pass when its request gets a slot) and no state to return, and the number of steps is
known from the start, so the host knows when a request ends without reading from the device.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from linnet.core.errors import invalid
from linnet.models.prior.conditions import check_encodings
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import PriorParams
from linnet.models.prior.sampling import check_guidance, effective_guidance
from linnet.models.prior.solver import SolverTable, default_steps, make_solver
from linnet.serve.engine_loop import EngineLoop
from linnet.serve.prior.backend import PriorBackend, Slots, Ticket
from linnet.serve.prior.request import Denoised, OnSampleEvent, Sampled, SampleRequest
from linnet.serve.request import FinishReason
from linnet.serve.scheduler import Plan as Turn
from linnet.serve.state import model_fingerprint

PLANS_KEPT = 256


class Job:
    """One request in the engine."""

    def __init__(self, request: SampleRequest, plan: SolverTable, guidance: float, on_event: OnSampleEvent) -> None:
        self.request, self.plan, self.guidance = request, plan, guidance
        self.slot_state: Slots | None = None
        """The saved state, if it was preempted."""
        self.slot: int | None = None
        self.n_done = 0
        """Steps started so far."""
        self.is_done = False
        self._on_event = on_event

    @property
    def is_told(self) -> bool:
        """Whether progress is reported at the step just started: `n_told` evenly spaced steps, without the last."""
        n, parts = len(self.plan), self.request.n_told + 1
        return self.n_done < n and self.n_done * parts // n > (self.n_done - 1) * parts // n

    def notify(self, step: int, start: np.ndarray) -> None:
        self._on_event(Denoised(step=step, n_steps=len(self.plan), start=start))

    def finish(self, reason: FinishReason, *, embedding: np.ndarray | None = None, error: str | None = None) -> None:
        self.is_done = True
        self._on_event(
            Sampled(reason=reason, error=error, embedding=embedding, n_steps=len(self.plan), guidance=self.guidance)
        )


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that has not been read back yet, and the jobs that need its result: (job, slot, step)."""

    ticket: Ticket
    lookers: list[tuple[Job, int, int]]


class PriorEngine(EngineLoop[Job]):
    def __init__(
        self,
        cfg: PriorConfig,
        params: PriorParams,
        *,
        n_slots: int = 8,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("--slots", n_slots), ("--queue", max_waiting)):
            if value < 1:
                raise invalid(name, value, "at least 1", "use the default")
        if cfg.text_encodings and not cfg.max_text_len:
            needs = "above 0 with model.text_encodings: it is the capacity of a slot"
            raise invalid("model.max_text_len", 0, needs, "set it in the run's config.json; CLIP has 77 tokens")
        super().__init__(n_slots, max_waiting, clock, "linnet-prior")
        self.cfg, self.n_slots = cfg, n_slots
        self.backend = PriorBackend(cfg, params, n_slots)
        self.fingerprint = model_fingerprint(params, None, cfg)
        self._flight: _Flight | None = None
        self._n_steps = self._n_samples = 0

    # From any thread

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        """Queue a request. Events are sent from the engine's thread and end with exactly one `Sampled`. An invalid request raises
        here."""
        guidance = effective_guidance(request.guidance, self.cfg)
        self._queue(Job(request, plan_for(request, self.cfg), guidance, on_event), n_chunks=0)

    def stats(self) -> dict[str, float]:
        with self._changed:
            scheduler = self._scheduler
            return {
                "slots": self.n_slots,
                "waiting": scheduler.waiting,
                "running": scheduler.running,
                "parked": scheduler.preempted,
                "steps_total": self._n_steps,
                "samples_total": self._n_samples,
            }

    # In the engine's thread

    def _execute(self, plan: Turn) -> None:
        for id, reason in plan.ended:
            self._jobs.pop(id).finish(reason)
        for id, slot in plan.preempt:
            job = self._jobs[id]
            job.slot_state, job.slot = self.backend.save(slot), None
        for id, slot in plan.load:
            job = self._jobs[id]
            self.backend.load(slot, job.slot_state or self.backend.make_state(job.request, job.plan))
            job.slot_state, job.slot = None, slot
        with self._changed:  # other threads add jobs
            running = {job.slot: job for job in self._jobs.values() if job.slot is not None}
        before, self._flight = self._flight, None
        if running:
            self._flight = self._tick(running)
        # Read back while the next step runs: the device does not wait, and is at most one step ahead.
        if before is not None:
            self._collect(before)

    def _tick(self, running: dict[int, Job]) -> _Flight:
        lookers: list[tuple[Job, int, int]] = []
        guided = any(job.guidance != 1.0 for job in running.values())
        with self._changed:
            for slot, job in running.items():
                job.n_done += 1
                self._scheduler.ticked(job.request.id, 1)
                ends = job.n_done == len(job.plan)
                if ends or job.is_told:
                    lookers.append((job, slot, job.n_done))
                if ends:  # release the slot for the next tick, before the result is read back
                    job.slot = None
                    self._scheduler.release_slot(job.request.id)
        ticket = self.backend.tick(guided=guided, look=bool(lookers))
        self._n_steps += len(running)
        return _Flight(ticket, lookers)

    def _collect(self, flight: _Flight) -> None:
        ticket = flight.ticket
        if ticket.embeddings is None or ticket.starts is None:
            jax.block_until_ready(ticket.done)
            return
        embeddings, starts = np.asarray(ticket.embeddings), np.asarray(ticket.starts)
        for job, slot, step in flight.lookers:
            if job.is_done:
                continue
            if step < len(job.plan):
                job.notify(step, starts[slot].copy())
                continue
            self._n_samples += 1
            self._end(job, "stop", embedding=embeddings[slot].copy())

    def _reset(self) -> None:
        self.backend.reset()


def plan_for(request: SampleRequest, cfg: PriorConfig) -> SolverTable:
    """Validate a request against the model and return its solver table."""
    if request.text.shape != (cfg.d_text,):
        raise invalid("the embedding's width", request.text.shape, f"({cfg.d_text},)", "use the model's own encoder")
    check_encodings(None if request.encodings is None else request.encodings.shape, cfg)
    check_guidance(request.guidance, cfg)
    steps = default_steps(cfg, request.solver) if request.steps is None else request.steps
    return _plan(cfg, steps, request.solver, request.eta)


_plan = functools.lru_cache(maxsize=PLANS_KEPT)(make_solver)
