"""Continuous batching: one thread that reads prompts chunk by chunk, ticks all slots, and tells each request its tokens.

The scheduler decides, the backend computes, jobs keep the text. The next dispatch starts before the last one is read back, so the
device never waits for Python.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from linnet.data.tokenizer import Tokenizer
from linnet.errors import UserError, refuse
from linnet.families.family import Family
from linnet.serve.backend import N_TICKS, Backend, Ticket
from linnet.serve.constraint import Grammars
from linnet.serve.job import Job
from linnet.serve.prefix import PrefixCache
from linnet.serve.request import Choice, Draining, OnEvent, Request
from linnet.serve.scheduler import Plan, Scheduler
from linnet.serve.state import State, model_fingerprint

log = logging.getLogger("linnet.serve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    n_slots: int = 8
    max_waiting: int = 64
    prefix_bytes: int = 512 << 20
    """Of the prefix cache; 0: none."""
    max_prompt: int = 1 << 20
    """Longest prompt in tokens."""

    def __post_init__(self) -> None:
        for name in ("n_slots", "max_waiting", "max_prompt"):
            if getattr(self, name) < 1:
                raise refuse(f"--{name.replace('_', '-')}", getattr(self, name), "at least 1", "use the default")
        if self.prefix_bytes < 0:
            raise refuse("--prefix-bytes", self.prefix_bytes, "0 or more", "use 0 for no prefix cache")


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatch that was not read back yet, and who sat where."""

    ticket: Ticket
    jobs: dict[int, Job]


class Engine:
    def __init__(
        self,
        family: Family,
        cfg: Any,
        params: Any,
        buffers: Any,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.clock = config, clock
        self.backend = Backend(family, cfg, params, buffers, config.n_slots)
        self.fingerprint = model_fingerprint(params, buffers, cfg)
        self.prefix = PrefixCache(self.backend.chunk_len, config.prefix_bytes)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._grammars = Grammars(tokenizer, n_vocab=cfg.n_vocab)
        self._scheduler = Scheduler(config.n_slots, config.max_waiting)
        self._jobs: dict[str, Job] = {}
        self._flight: _Flight | None = None
        self._changed = threading.Condition()
        self._draining = self._stopping = False
        self._n_tokens = 0
        self._thread = threading.Thread(target=self._run, name="linnet-engine", daemon=True)

    # From any thread

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Events follow in the engine's thread, ending with exactly one `Finished`. What is wrong is refused here and now."""
        self._check(request)
        matcher = None if request.sampling.constraint is None else self._grammars.compile(request.sampling.constraint)
        id_bytes = self._tokenizer.id_bytes
        job = Job(request, on_event, end_id=self._cfg.end_id, id_bytes=id_bytes, matcher=matcher)
        if job.memory is None and request.use_prefix_cache:
            job.keys = self.prefix.keys(job.to_read)
        with self._changed:
            if self._draining:
                raise Draining("the server is about to stop. Fix: try another one, or try again later.")
            self._scheduler.submit(
                request.id,
                priority=request.priority,
                deadline=request.deadline,
                n_chunks=job.n_chunks(self.backend.chunk_len),
                now=self.clock(),
            )
            self._jobs[request.id] = job
            self._changed.notify()

    def cancel(self, id: str) -> None:
        with self._changed:
            self._scheduler.cancel(id)
            self._changed.notify()

    def stats(self) -> dict[str, float]:
        with self._changed:
            scheduler = self._scheduler
            return {
                "slots": self.config.n_slots,
                "waiting": scheduler.waiting,
                "reading": scheduler.reading,
                "running": scheduler.running,
                "parked": scheduler.parked,
                "tokens_total": self._n_tokens,
                "prefix_hits": self.prefix.hits,
                "prefix_misses": self.prefix.misses,
                "prefix_bytes": self.prefix.n_bytes,
                "state_bytes": self.backend.state_bytes,
            }

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

    def _check(self, request: Request) -> None:
        n_vocab = self._cfg.n_vocab
        if len(request.prompt) > self.config.max_prompt:
            most = self.config.max_prompt
            raise refuse(
                "the prompt", f"{len(request.prompt)} tokens", f"at most {most}", "send it in parts, with a session"
            )
        sampling = request.sampling
        named = {*sampling.logit_bias, *(sampling.allowed or ()), *sampling.banned, *sampling.stop_ids, *request.prompt}
        wrong = [token for token in named if not 0 <= token < n_vocab]
        if wrong:
            raise refuse("a token id", wrong[0], f"0 to {n_vocab - 1}", "use the model's tokenizer")
        if request.state is not None and request.state.model != self.fingerprint:
            raise UserError("the state belongs to another model. Fix: go on with the model that made it.")
        if len(sampling.banned) >= n_vocab:
            raise refuse("banned", "every id", "at least one id left", "ban fewer")

    # In the engine's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._scheduler.is_idle and self._flight is None and not self._stopping:
                    self._changed.wait()
                if self._stopping and self._scheduler.is_idle:
                    break
                plan = self._scheduler.plan(self.clock())
            try:
                self._carry_out(plan)
            except Exception as error:
                log.exception("a batch failed")
                self._fail_batch(str(error))

    def _carry_out(self, plan: Plan) -> None:
        for id, reason in plan.ended:
            self._jobs.pop(id).finish(reason)
        for id, slot in plan.park:
            job = self._jobs[id]
            job.seat, job.slot = self.backend.take(slot, _positions(job)), None
        if plan.read is not None:
            self._read(self._jobs[plan.read])
        for id, slot in plan.place:
            self._place(self._jobs[id], slot)
        running = {job.slot: job for job in self._jobs.values() if job.slot is not None}
        if not plan.tick or not running:
            self._collect()
            return
        constrained = any(job.matcher is not None for job in running.values())
        if constrained:  # what may come next depends on what came last
            self._collect()
            running = {job.slot: job for job in self._jobs.values() if job.slot is not None}
            running = {slot: job for slot, job in running.items() if self._may_go_on(slot, job)}
        if running:
            before, self._flight = self._flight, self._dispatch(running, constrained)
            self._collect(before)
        if constrained:
            self._collect()

    def _may_go_on(self, slot: int, job: Job) -> bool:
        """Restricts a slot to what its grammar allows next; one that is stuck ends here, alone."""
        if job.matcher is None:
            return True
        try:
            allowed = job.matcher.mask()
            if self.backend.restrict(slot, allowed):
                return True
            error = "no token that the grammar allows is left by allowed, banned and logit_bias"
        except UserError as refusal:
            error = str(refusal)
        with self._changed:
            self._scheduler.ended(job.request.id)
        self._jobs.pop(job.request.id).finish("error", error=error)
        return False

    def _dispatch(self, running: dict[int, Job], constrained: bool) -> _Flight:
        fresh = any(job.is_fresh for job in running.values())
        ticket = self.backend.dispatch(
            1 if fresh or constrained else N_TICKS,
            with_top=any(job.request.sampling.top_logprobs for job in running.values()),
            keep=[slot for slot, job in running.items() if job.request.return_state],
        )
        for job in running.values():
            job.is_fresh = False
        return _Flight(ticket, dict(running))

    def _read(self, job: Job) -> None:
        """One chunk of a prompt, or as many as the prefix cache knows."""
        size = self.backend.chunk_len
        if job.memory is None:
            known, memory = self.prefix.longest(job.keys) if not job.request.prompt_logprobs else (0, None)
            job.memory = self.backend.empty_memory() if memory is None else memory
            job.n_read = job.n_cached = known * size
            if known:
                with self._changed:
                    self._scheduler.shorten(job.request.id, job.n_chunks(size))
        chunk = job.next_chunk(size)
        if not chunk:
            return
        if job.request.prompt_logprobs:
            targets = [*job.to_read, job.last][job.n_read + 1 : job.n_read + 1 + len(chunk)]
            job.logprobs += self.backend.chunk_logprobs(job.memory, chunk, targets)
        job.memory = self.backend.read_chunk(job.memory, chunk)
        job.n_read += len(chunk)
        n = job.n_read // size
        if len(chunk) == size and n <= len(job.keys) and self.prefix.wants(n, len(job.keys)):
            self.prefix.add(job.keys[n - 1], job.memory, _n_bytes(job.memory))

    def _place(self, job: Job, slot: int) -> None:
        if job.seat is None:
            while job.n_read < len(job.to_read):  # the cache knew less than when it was asked
                self._read(job)
            memory = self.backend.empty_memory() if job.memory is None else job.memory
            job.seat = self.backend.seat(memory, job.last, _positions(job))
            job.tell_prompt_read()
        prompt = [*job.to_read[1:], job.last] if job.to_read else []
        self.backend.place(slot, job.seat, job.request.sampling, prompt, job.late)
        job.seat, job.slot, job.memory = None, slot, None

    def _collect(self, flight: _Flight | None = None) -> None:
        """Reads a dispatch back and tells everyone theirs: this one, or the one on its way."""
        if flight is None:
            flight, self._flight = self._flight, None
        if flight is None:
            return
        tokens, logprobs = np.asarray(flight.ticket.tokens), np.asarray(flight.ticket.logprobs)
        top = None if flight.ticket.top is None else tuple(map(np.asarray, flight.ticket.top))
        for slot, job in flight.jobs.items():
            if not job.is_done:
                self._tell(job, slot, flight.ticket, tokens[:, slot].tolist(), logprobs[:, slot].tolist(), top)

    def _tell(
        self, job: Job, slot: int, ticket: Ticket, tokens: list[int], logprobs: list[float], top: tuple[Any, ...] | None
    ) -> None:
        likeliest = None
        if top is not None and job.request.sampling.top_logprobs:
            ids, values = top[0][:, slot].tolist(), top[1][:, slot].tolist()
            likeliest = [[Choice(i, v) for i, v in zip(*row, strict=True)] for row in zip(ids, values, strict=True)]
        n, reason, stopped_by = job.take(tokens, logprobs, likeliest)
        self._n_tokens += n
        id = job.request.id
        if reason is None:
            with self._changed:
                self._scheduler.ticked(id, n)
            return
        state = None
        if job.request.return_state:
            memory = self.backend.memory_after(ticket.before[slot], tokens[: n - 1])
            state = State(memory=memory, last=tokens[n - 1], n_tokens=job.n_tokens_after, model=self.fingerprint)
        with self._changed:
            self._scheduler.ended(id)
        self._jobs.pop(id).finish(reason, stopped_by, state)

    def _fail_batch(self, error: str) -> None:
        """Whatever held a slot or was being read is lost; the rest goes on."""
        self._flight = None
        lost = [job for job in self._jobs.values() if job.slot is not None or job.memory is not None]
        for job in lost:
            with self._changed:
                self._scheduler.ended(job.request.id)
            self._jobs.pop(job.request.id).finish("error", error=error)
        self.backend.reset()


def _positions(job: Job) -> int:
    """Tokens that a request had read when it was first placed: where its draws begin to count."""
    return job.n_before + len(job.to_read)


def _n_bytes(memory: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
