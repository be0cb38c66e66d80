"""Continuous batching: one thread that prefills prompts in chunks, ticks all slots, and sends each request its tokens.

The scheduler decides, the backend computes, and jobs keep the text. The next dispatch starts before the last one is read back, so
that the device never waits for Python.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from linnet.core.errors import UserError, invalid
from linnet.models.base import TokenFamily
from linnet.models.bos import in_front
from linnet.serve.backend import N_TICKS, Backend, Dispatch, SlotState, token_logprobs
from linnet.serve.engine_loop import EngineLoop, check_queue
from linnet.serve.grammar import Grammars
from linnet.serve.job import TokenJob
from linnet.serve.prefix_cache import PrefixCache
from linnet.serve.request import OnEvent, Request, TooLong
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
        check_queue(self.n_slots, self.max_waiting)
        if self.max_prompt < 1:
            raise invalid("max_prompt", self.max_prompt, "at least 1", "use the default")
        if self.prefix_bytes < 0:
            raise invalid("--prefix-mb", self.prefix_bytes >> 20, "0 or more", "use 0 for no prefix cache")


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatch that has not been read back yet, and the job of each of its columns."""

    dispatch: Dispatch
    jobs: dict[int, TokenJob]


class Engine(EngineLoop[TokenJob, Backend]):
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
        super().__init__(
            Backend(family, cfg, params, buffers, config.n_slots),
            model_fingerprint(params, buffers, cfg),
            n_slots=config.n_slots,
            max_waiting=config.max_waiting,
            clock=clock,
            name="linnet-engine",
        )
        self.config = config
        self.prefix = PrefixCache(self.backend.chunk_len, config.prefix_bytes)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._grammars = Grammars(tokenizer, n_vocab=cfg.n_vocab)
        self._flight: _InFlight | None = None
        self._n_tokens = 0

    # From any thread

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Events are sent from the engine's thread and end with exactly one `Finished`. An invalid request raises
        here."""
        self._check(request)
        matcher = None if request.sampling.constraint is None else self._grammars.compile(request.sampling.constraint)
        job = TokenJob(
            request,
            on_event,
            end_id=self._cfg.end_id,
            bos_id=self._cfg.bos_id,
            context=self._cfg.context,
            text_rules=self._tokenizer.text_rules,
            matcher=matcher,
        )
        if job.memory is not None:
            job.memory = self.backend.to_device(job.memory)
        elif request.use_prefix_cache:
            job.keys = self.prefix.keys(job.to_read)
        self._queue(job, job.n_chunks(self.backend.chunk_len))

    def append(self, state: State | None, ids: Sequence[int]) -> State:
        """Return the state after these ids, which are read as a prompt is but not answered. None: start a sequence, with the model's
        BOS id. Computed in the caller's thread; the engine may run other requests meanwhile."""
        self._check_ids(ids)
        front = in_front(self._cfg.bos_id, True) if state is None else (state.last,)
        n_read = 0 if state is None else state.n_tokens - 1
        memory = self.backend.empty_memory() if state is None else self.backend.to_device(state.memory)
        *to_read, last = (*front, *ids)
        n_tokens, context = n_read + len(to_read) + 1, self._cfg.context
        if context is not None and n_tokens > context:
            needs = f"at most {context} tokens, the model's context"
            raise TooLong(str(invalid("the conversation", f"{n_tokens} tokens", needs, "start another one")))
        size = self.backend.chunk_len
        for start in range(0, len(to_read), size):
            memory = self.backend.prefill_chunk(memory, to_read[start : start + size])
        n_front = len(front) if state is None else state.n_front
        return State(memory=memory, last=last, n_tokens=n_tokens, model=self.fingerprint, n_front=n_front)

    def stats(self) -> dict[str, float]:
        with self._changed:
            scheduler = self._scheduler
            return {
                "slots": self.config.n_slots,
                "waiting": scheduler.waiting,
                "reading": scheduler.prefilling,
                "running": scheduler.running,
                "parked": scheduler.preempted,
                "tokens_total": self._n_tokens,
                "prefix_hits": self.prefix.hits,
                "prefix_misses": self.prefix.misses,
                "prefix_bytes": self.prefix.n_bytes,
                "state_bytes": self.backend.state_bytes,
            }

    def _check_ids(self, ids: Iterable[int]) -> None:
        n_vocab = self._cfg.n_vocab
        wrong = next((token for token in ids if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise invalid("a token id", wrong, f"0 to {n_vocab - 1}", "use the model's tokenizer")

    def _check(self, request: Request) -> None:
        n_vocab = self._cfg.n_vocab
        if len(request.prompt) > self.config.max_prompt:
            maximum = self.config.max_prompt
            raise invalid(
                "the prompt", f"{len(request.prompt)} tokens", f"at most {maximum}", "send it in parts with a session"
            )
        sampling = request.sampling
        self._check_ids(
            {*sampling.logit_bias, *(sampling.allowed or ()), *sampling.banned, *sampling.stop_ids, *request.prompt}
        )
        if request.state is not None and request.state.model != self.fingerprint:
            raise UserError("the state belongs to another model. Fix: continue it with the model that created it.")
        if len(sampling.banned) >= n_vocab:
            raise invalid("banned_token_ids", "every id", "at least one id fewer", "ban fewer ids")
        excluded = sampling.banned | sampling.stop_ids | (frozenset() if sampling.ignore_eos else {self._cfg.end_id})
        n_left = n_vocab - len(excluded) if sampling.allowed is None else len(sampling.allowed - excluded)
        if sampling.min_tokens and not n_left:
            needs = "0 if only ids that end the text may be sampled"
            raise invalid("min_tokens", sampling.min_tokens, needs, "allow another id, or omit min_tokens")

    # In the engine's thread

    def _save(self, job: TokenJob, slot: int) -> SlotState:
        return self.backend.save(slot, _positions(job))

    def _execute(self, plan: Plan) -> None:
        if plan.prefill is not None:
            self._prefill(self._jobs[plan.prefill])
        first = [flight for id, slot in plan.load if (flight := self._load(self._jobs[id], slot)) is not None]
        running = self._running() if plan.tick else {}
        constrained = any(job.matcher is not None for job in running.values())
        before, self._flight = self._flight, None
        if constrained:  # the next mask depends on the last token
            self._collect(before, *first)
            before, first = None, []
            running = {slot: job for slot, job in self._running().items() if self._mask_by_grammar(slot, job)}
        if running:
            self._flight = self._dispatch(running, constrained)
        self._collect(before, *first)
        if constrained:
            self._collect(self._flight)
            self._flight = None

    def _mask_by_grammar(self, slot: int, job: TokenJob) -> bool:
        """Restrict a slot to the ids that its grammar allows next. If there are none, end this request, and only this one."""
        if job.matcher is None:
            return True
        try:
            if self.backend.mask_next(slot, job.allowed_next()):
                return True
            error = (
                "allowed_token_ids, banned_token_ids and min_tokens exclude every token that the grammar allows here. Fix: exclude "
                "fewer ids, or change the grammar."
            )
        except UserError as failure:
            error = str(failure)
        self._end(job, "stuck", error=error)
        return False

    def _dispatch(self, running: dict[int, TokenJob], constrained: bool) -> _InFlight:
        n_ticks = 1 if constrained else self._n_ticks(running)
        dispatch = self.backend.dispatch(
            n_ticks,
            list(running),
            with_top=any(job.request.sampling.top_logprobs for job in running.values()),
            keep=[slot for slot, job in running.items() if job.request.return_state],
        )
        for job in running.values():
            self._count_dispatched(job, n_ticks)
        return _InFlight(dispatch, dict(running))

    def _n_ticks(self, running: dict[int, TokenJob]) -> int:
        """Ticks of the next dispatch. While requests wait for a slot: until the first slot is free, but at least `MIN_TICKS`;
        otherwise as many as the longest answer needs."""
        left = [job.max_tokens - job.n_dispatched for job in running.values()]
        with self._changed:
            wanted = self._scheduler.wants_slots
        return min(N_TICKS, max(MIN_TICKS, min(left)) if wanted else max(left))

    def _count_dispatched(self, job: TokenJob, n_ticks: int) -> None:
        """Count tokens that were dispatched. If they complete the answer, release the slot without waiting for their values."""
        job.n_dispatched += n_ticks
        if job.n_dispatched >= job.max_tokens:
            self._release_slot(job)

    def _prefill(self, job: TokenJob) -> None:
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
        job.memory = self.backend.prefill_chunk(job.memory, chunk)
        job.n_read += len(chunk)
        n = job.n_read // size
        if len(chunk) == size and n <= len(job.keys) and self.prefix.wants(n, len(job.keys)):
            self.prefix.add(job.keys[n - 1], job.memory)

    def _load(self, job: TokenJob, slot: int) -> _InFlight | None:
        """Load a request into its slot. A new request also samples its first token, unless its grammar allows none."""
        is_fresh = job.slot_state is None
        if job.slot_state is None:
            while job.n_read < len(job.to_read):  # the prefix cache had fewer chunks than expected
                self._prefill(job)
            memory = self.backend.empty_memory() if job.memory is None else job.memory
            job.slot_state = self.backend.make_state(memory, job.last, _positions(job))
            job.notify_prefill_done()
        state = job.slot_state
        prompt = (*job.request.appended, *job.prompt)
        self.backend.set_sampling(slot, state, job.request.sampling, prompt, job.min_token_ids)
        job.slot_state, job.slot, job.memory = None, slot, None
        if not is_fresh:
            self.backend.load(slot, state)
            return None
        if not self._mask_by_grammar(slot, job):
            return None
        flight = _InFlight(self.backend.first_token(slot, state), {0: job})
        self._count_dispatched(job, 1)
        return flight

    def _collect(self, *flights: _InFlight | None) -> None:
        """Read dispatches back and send each job its tokens."""
        for flight in flights:
            if flight is None:
                continue
            n = flight.dispatch.n_ticks
            tokens, logprobs = np.asarray(flight.dispatch.tokens)[:n], np.asarray(flight.dispatch.logprobs)[:n]
            for column, job in flight.jobs.items():
                if not job.is_done:
                    self._deliver(
                        job, column, flight.dispatch, tokens[:, column].tolist(), logprobs[:, column].tolist()
                    )

    def _deliver(
        self, job: TokenJob, column: int, dispatch: Dispatch, tokens: list[int], logprobs: list[float]
    ) -> None:
        top = None
        if dispatch.top is not None and job.request.sampling.top_logprobs:
            ids, values = (np.asarray(one)[: dispatch.n_ticks, column] for one in dispatch.top)
            top = token_logprobs(ids, values)
        try:
            n, reason, stopped_by = job.take(tokens, logprobs, top)
        except UserError as failure:  # its grammar exceeded the limits: only this request ends
            self._end(job, "stuck", error=str(failure))
            return
        self._n_tokens += n
        if reason is None:
            with self._changed:
                self._scheduler.ticked(job.request.id, n)
            return
        state = None
        if job.request.return_state:
            memory = self.backend.memory_after(dispatch.before[column], tokens[: n - 1])
            state = State(
                memory=memory,
                last=tokens[n - 1],
                n_tokens=job.n_tokens_after,
                model=self.fingerprint,
                n_front=job.n_front,
            )
        self._end(job, reason, stopped_by=stopped_by, state=state)


def _positions(job: TokenJob) -> int:
    """Tokens that a request had read when it was first loaded into a slot: its positions are counted from there."""
    return job.n_before + len(job.to_read)
