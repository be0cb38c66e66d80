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
from linnet.serve.engine_loop import EngineLoop, check_queue
from linnet.serve.prior.backend import PriorBackend, PriorSlots, StepDispatch
from linnet.serve.prior.request import Denoised, OnSampleEvent, Sampled, SampleRequest
from linnet.serve.request import FinishReason
from linnet.serve.scheduler import Plan
from linnet.serve.state import model_fingerprint

MAX_CACHED_SOLVERS = 256


class PriorJob:
    """One request in the engine."""

    def __init__(self, request: SampleRequest, table: SolverTable, guidance: float, on_event: OnSampleEvent) -> None:
        self.request, self.table, self.guidance = request, table, guidance
        self.slot_state: PriorSlots | None = None
        """The saved state, if it was preempted."""
        self.slot: int | None = None
        self.n_done = 0
        """Steps started so far."""
        self.is_done = False
        self._on_event = on_event

    @property
    def reports_progress(self) -> bool:
        """Whether progress is reported at the step just started: `n_progress` evenly spaced steps, without the last."""
        n, parts = len(self.table), self.request.n_progress + 1
        return self.n_done < n and self.n_done * parts // n > (self.n_done - 1) * parts // n

    def notify(self, step: int, start: np.ndarray) -> None:
        self._on_event(Denoised(step=step, n_steps=len(self.table), start=start))

    def finish(self, reason: FinishReason, *, embedding: np.ndarray | None = None, error: str | None = None) -> None:
        self.is_done = True
        self._on_event(
            Sampled(reason=reason, error=error, embedding=embedding, n_steps=len(self.table), guidance=self.guidance)
        )


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A step that has not been read back yet, and the jobs that need its result: (job, slot, step)."""

    dispatch: StepDispatch
    receivers: list[tuple[PriorJob, int, int]]


class PriorEngine(EngineLoop[PriorJob, PriorBackend]):
    def __init__(
        self,
        cfg: PriorConfig,
        params: PriorParams,
        *,
        n_slots: int = 8,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_queue(n_slots, max_waiting)
        if cfg.text_encodings and not cfg.max_text_len:
            needs = "above 0 with model.text_encodings: it is the capacity of a slot"
            raise invalid("model.max_text_len", 0, needs, "set it in the run's config.json; CLIP has 77 tokens")
        super().__init__(
            PriorBackend(cfg, params, n_slots),
            model_fingerprint(params, None, cfg),
            n_slots=n_slots,
            max_waiting=max_waiting,
            clock=clock,
            name="linnet-prior",
        )
        self.cfg, self.n_slots = cfg, n_slots
        self._flight: _InFlight | None = None
        self._n_steps = self._n_samples = 0

    # From any thread

    def submit(self, request: SampleRequest, on_event: OnSampleEvent) -> None:
        """Queue a request. Events are sent from the engine's thread and end with exactly one `Sampled`. An invalid request raises
        here."""
        guidance = effective_guidance(request.guidance, self.cfg)
        self._queue(PriorJob(request, make_solver_table(request, self.cfg), guidance, on_event), n_chunks=0)

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

    def _save(self, job: PriorJob, slot: int) -> PriorSlots:
        return self.backend.save(slot)

    def _execute(self, plan: Plan) -> None:
        for id, slot in plan.load:
            job = self._jobs[id]
            self.backend.load(slot, job.slot_state or self.backend.make_state(job.request, job.table))
            job.slot_state, job.slot = None, slot
        running = self._running()
        before, self._flight = self._flight, None
        if running:
            self._flight = self._tick(running)
        # Read back while the next step runs: the device does not wait, and is at most one step ahead.
        if before is not None:
            self._collect(before)

    def _tick(self, running: dict[int, PriorJob]) -> _InFlight:
        receivers: list[tuple[PriorJob, int, int]] = []
        guided = any(job.guidance != 1.0 for job in running.values())
        with self._changed:
            for slot, job in running.items():
                job.n_done += 1
                self._scheduler.ticked(job.request.id, 1)
                is_last = job.n_done == len(job.table)
                if is_last or job.reports_progress:
                    receivers.append((job, slot, job.n_done))
                if is_last:
                    self._release_slot(job)
        dispatch = self.backend.tick(guided=guided, with_embeddings=bool(receivers))
        self._n_steps += len(running)
        return _InFlight(dispatch, receivers)

    def _collect(self, flight: _InFlight) -> None:
        dispatch = flight.dispatch
        if dispatch.embeddings is None or dispatch.starts is None:
            jax.block_until_ready(dispatch.done)
            return
        embeddings, starts = np.asarray(dispatch.embeddings), np.asarray(dispatch.starts)
        for job, slot, step in flight.receivers:
            if job.is_done:
                continue
            if step < len(job.table):
                job.notify(step, starts[slot].copy())
                continue
            self._n_samples += 1
            self._end(job, "stop", embedding=embeddings[slot].copy())


def make_solver_table(request: SampleRequest, cfg: PriorConfig) -> SolverTable:
    """Validate a request against the model and return its solver table."""
    if request.text.shape != (cfg.d_text,):
        raise invalid("the embedding's width", request.text.shape, f"({cfg.d_text},)", "use the model's own encoder")
    check_encodings(None if request.encodings is None else request.encodings.shape, cfg)
    check_guidance(request.guidance, cfg)
    steps = default_steps(cfg, request.solver) if request.steps is None else request.steps
    return _cached_solver(cfg, steps, request.solver, request.eta)


_cached_solver = functools.lru_cache(maxsize=MAX_CACHED_SOLVERS)(make_solver)
