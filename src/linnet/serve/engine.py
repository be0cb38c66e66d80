"""Continuous batching: one thread that prefills prompts in chunks, ticks all slots, and sends each request its tokens.

The scheduler decides, the backend computes, and jobs keep the text. The next dispatch starts before the last one is read back, so
that the device never waits for Python.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from linnet.core.errors import UserError, invalid
from linnet.models.base import TokenFamily
from linnet.serve.backend import N_TICKS, Backend, Dispatch
from linnet.serve.engine_loop import EngineLoop
from linnet.serve.grammar import Grammars
from linnet.serve.job import Job
from linnet.serve.prefix_cache import PrefixCache
from linnet.serve.request import Choice, OnEvent, Request
from linnet.serve.scheduler import Plan
from linnet.serve.state import State, model_fingerprint
from linnet.tokenizers.base import Tokenizer

MIN_TICKS = 4
"""Minimum ticks of a dispatch that is shortened to free a slot: with fewer the device would wait for the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    n_slots: int = 8
    max_waiting: int = 64
    prefix_bytes: int = 512 << 20
    """Maximum size of the prefix cache in bytes; 0 disables it."""
    max_prompt: int = 1 << 20
    """Maximum prompt length in tokens."""

    def __post_init__(self) -> None:
        for name in ("n_slots", "max_waiting", "max_prompt"):
            if getattr(self, name) < 1:
                raise invalid(f"--{name.replace('_', '-')}", getattr(self, name), "at least 1", "use the default")
        if self.prefix_bytes < 0:
            raise invalid("--prefix-bytes", self.prefix_bytes, "0 or more", "use 0 for no prefix cache")


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatch that has not been read back yet, and the job of each of its columns."""

    ticket: Dispatch
    jobs: dict[int, Job]


class Engine(EngineLoop[Job]):
    def __init__(
        self,
        family: TokenFamily,
        cfg: Any,
        params: Any,
        buffers: Any,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config.n_slots, config.max_waiting, clock, "linnet-engine")
        self.config = config
        self.backend = Backend(family, cfg, params, buffers, config.n_slots)
        self.fingerprint = model_fingerprint(params, buffers, cfg)
        self.prefix = PrefixCache(self.backend.chunk_len, config.prefix_bytes)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._grammars = Grammars(tokenizer, n_vocab=cfg.n_vocab)
        self._flight: _Flight | None = None
        self._n_tokens = 0

    # From any thread

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Events are sent from the engine's thread and end with exactly one `Finished`. An invalid request raises
        here."""
        self._check(request)
        matcher = None if request.sampling.constraint is None else self._grammars.compile(request.sampling.constraint)
        job = Job(
            request,
            on_event,
            end_id=self._cfg.end_id,
            bos_id=self._cfg.bos_id,
            context=self._cfg.context,
            text_rules=self._tokenizer.text_rules,
            matcher=matcher,
        )
        if job.memory is not None:
            job.memory = self.backend.placed(job.memory)
        elif request.use_prefix_cache:
            job.keys = self.prefix.keys(job.to_read)
        self._queue(job, job.n_chunks(self.backend.chunk_len))

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

    def _check(self, request: Request) -> None:
        n_vocab = self._cfg.n_vocab
        if len(request.prompt) > self.config.max_prompt:
            most = self.config.max_prompt
            raise invalid(
                "the prompt", f"{len(request.prompt)} tokens", f"at most {most}", "send it in parts, with a session"
            )
        sampling = request.sampling
        named = {*sampling.logit_bias, *(sampling.allowed or ()), *sampling.banned, *sampling.stop_ids, *request.prompt}
        wrong = [token for token in named if not 0 <= token < n_vocab]
        if wrong:
            raise invalid("a token id", wrong[0], f"0 to {n_vocab - 1}", "use the model's tokenizer")
        if request.state is not None and request.state.model != self.fingerprint:
            raise UserError("the state belongs to another model. Fix: go on with the model that made it.")
        if len(sampling.banned) >= n_vocab:
            raise invalid("banned", "every id", "at least one id left", "ban fewer")
        gone = sampling.banned | sampling.stop_ids | (frozenset() if sampling.ignore_end else {self._cfg.end_id})
        n_left = n_vocab - len(gone) if sampling.allowed is None else len(sampling.allowed - gone)
        if sampling.min_tokens and not n_left:
            needs = "0 where only ids that end the text may be drawn"
            raise invalid("min_tokens", sampling.min_tokens, needs, "allow another id, or leave it out")

    # In the engine's thread

    def _execute(self, plan: Plan) -> None:
        for id, reason in plan.ended:
            self._jobs.pop(id).finish(reason)
        for id, slot in plan.park:
            job = self._jobs[id]
            job.seat, job.slot = self.backend.take(slot, _positions(job)), None
        if plan.read is not None:
            self._read(self._jobs[plan.read])
        begun = [flight for id, slot in plan.place if (flight := self._place(self._jobs[id], slot)) is not None]
        running = self._running() if plan.tick else {}
        constrained = any(job.matcher is not None for job in running.values())
        before, self._flight = self._flight, None
        if constrained:  # the next mask depends on the last token
            self._collect(before, *begun)
            before, begun = None, []
            running = {slot: job for slot, job in self._running().items() if self._may_go_on(slot, job)}
        if running:
            self._flight = self._dispatch(running, constrained)
        self._collect(before, *begun)
        if constrained:
            self._collect(self._flight)
            self._flight = None

    def _running(self) -> dict[int, Job]:
        with self._changed:  # other threads add jobs
            return {job.slot: job for job in self._jobs.values() if job.slot is not None}

    def _may_go_on(self, slot: int, job: Job) -> bool:
        """Restrict a slot to the ids that its grammar allows next. If there are none, end this request, and only this one."""
        if job.matcher is None:
            return True
        try:
            if self.backend.restrict(slot, job.allowed_next()):
                return True
            error = (
                "no token that the grammar allows is left by the ids that are allowed, banned or too early (min_tokens). Fix: "
                "rule out fewer ids, or change the grammar."
            )
        except UserError as refusal:
            error = str(refusal)
        self._end(job, "stuck", error=error)
        return False

    def _dispatch(self, running: dict[int, Job], constrained: bool) -> _Flight:
        n_ticks = 1 if constrained else self._n_ticks(running)
        ticket = self.backend.dispatch(
            n_ticks,
            list(running),
            with_top=any(job.request.sampling.top_logprobs for job in running.values()),
            keep=[slot for slot, job in running.items() if job.request.return_state],
        )
        for job in running.values():
            self._asked(job, n_ticks)
        return _Flight(ticket, dict(running))

    def _n_ticks(self, running: dict[int, Job]) -> int:
        """Ticks of the next dispatch. While requests wait for a slot: until the first slot is free, but at least `MIN_TICKS`;
        otherwise as many as the longest answer needs."""
        left = [job.max_tokens - job.n_asked for job in running.values()]
        with self._changed:
            wanted = self._scheduler.wants_slots
        return min(N_TICKS, max(MIN_TICKS, min(left)) if wanted else max(left))

    def _asked(self, job: Job, n_ticks: int) -> None:
        """Count tokens that were dispatched. If they complete the answer, release the slot without waiting for their values."""
        job.n_asked += n_ticks
        if job.n_asked >= job.max_tokens:
            job.slot = None
            with self._changed:
                self._scheduler.leaves(job.request.id)

    def _read(self, job: Job) -> None:
        """Prefill one chunk of a prompt, after the chunks that are in the prefix cache."""
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
        if self._flight is not None:  # at most one chunk in flight beside the ticks: more would delay them
            self.backend.wait_for(job.memory)
        if job.request.prompt_logprobs:
            targets = [*job.to_read, job.last][job.n_read + 1 : job.n_read + 1 + len(chunk)]
            with_top = job.request.sampling.top_logprobs > 0
            logprobs, top = self.backend.chunk_logprobs(job.memory, chunk, targets, with_top=with_top)
            job.logprobs += logprobs
            job.top += [tuple(row[: job.request.sampling.top_logprobs]) for row in top]
        job.memory = self.backend.read_chunk(job.memory, chunk)
        job.n_read += len(chunk)
        n = job.n_read // size
        if len(chunk) == size and n <= len(job.keys) and self.prefix.wants(n, len(job.keys)):
            self.prefix.add(job.keys[n - 1], job.memory)

    def _place(self, job: Job, slot: int) -> _Flight | None:
        """Load a request into its slot. A new request also samples its first token, unless its grammar allows none."""
        is_fresh = job.seat is None
        if job.seat is None:
            while job.n_read < len(job.to_read):  # the prefix cache had fewer chunks than expected
                self._read(job)
            memory = self.backend.empty_memory() if job.memory is None else job.memory
            job.seat = self.backend.seat(memory, job.last, _positions(job))
            job.tell_prompt_read()
        seat = job.seat
        self.backend.rule(slot, seat, job.request.sampling, job.prompt, job.late)
        job.seat, job.slot, job.memory = None, slot, None
        if not is_fresh:
            self.backend.put(slot, seat)
            return None
        if not self._may_go_on(slot, job):
            return None
        flight = _Flight(self.backend.begin(slot, seat), {0: job})
        self._asked(job, 1)
        return flight

    def _collect(self, *flights: _Flight | None) -> None:
        """Read dispatches back and send each job its tokens."""
        for flight in flights:
            if flight is None:
                continue
            n = flight.ticket.n_ticks
            tokens, logprobs = np.asarray(flight.ticket.tokens)[:n], np.asarray(flight.ticket.logprobs)[:n]
            for column, job in flight.jobs.items():
                if not job.is_done:
                    self._tell(job, column, flight.ticket, tokens[:, column].tolist(), logprobs[:, column].tolist())

    def _tell(self, job: Job, column: int, ticket: Dispatch, tokens: list[int], logprobs: list[float]) -> None:
        likeliest = None
        if ticket.top is not None and job.request.sampling.top_logprobs:
            ids, values = (np.asarray(one)[: ticket.n_ticks, column].tolist() for one in ticket.top)
            likeliest = [[Choice(i, v) for i, v in zip(*row, strict=True)] for row in zip(ids, values, strict=True)]
        try:
            n, reason, stopped_by = job.take(tokens, logprobs, likeliest)
        except UserError as refusal:  # its grammar exceeded the limits: only this request ends
            self._end(job, "stuck", error=str(refusal))
            return
        self._n_tokens += n
        if reason is None:
            with self._changed:
                self._scheduler.ticked(job.request.id, n)
            return
        state = None
        if job.request.return_state:
            memory = self.backend.memory_after(ticket.before[column], tokens[: n - 1])
            state = State(
                memory=memory,
                last=tokens[n - 1],
                n_tokens=job.n_tokens_after,
                model=self.fingerprint,
                n_front=job.n_front,
            )
        self._end(job, reason, stopped_by=stopped_by, state=state)

    def _reset(self) -> None:
        self.backend.reset()


def _positions(job: Job) -> int:
    """Tokens that a request had read when it was first loaded into a slot: its positions are counted from there."""
    return job.n_before + len(job.to_read)
