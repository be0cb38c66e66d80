"""One request on its way through the engine: what is still to read, what was written, and when it ends. No device, no threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from linnet.serve.backend import Seat
from linnet.serve.constraint import Matcher
from linnet.serve.detokenize import TextAssembler
from linnet.serve.request import Choice, Event, Finished, FinishReason, OnEvent, Produced, PromptRead, Request


class Job:
    def __init__(
        self,
        request: Request,
        on_event: OnEvent,
        *,
        end_id: int,
        id_bytes: Callable[[int], bytes],
        matcher: Matcher | None,
    ) -> None:
        self.request, self.matcher = request, matcher
        first = end_id if request.state is None else request.state.last
        *self.to_read, self.last = (first, *request.prompt)
        self.n_before = 0 if request.state is None else request.state.n_tokens - 1
        """Tokens that the state had read when it came."""
        self.memory: Any = None if request.state is None else request.state.memory
        self.n_read = 0
        """Of `to_read`."""
        self.n_cached = 0
        self.keys: list[bytes] = []
        """Of the whole chunks of `to_read`, for the prefix cache."""
        self.logprobs: list[float] = []
        self.seat: Seat | None = None
        self.slot: int | None = None
        self.is_fresh = True
        """Its first token was not asked for yet."""
        self.is_done = False
        sampling = request.sampling
        self.ends = frozenset() if sampling.ignore_end else frozenset({end_id})
        self._on_event, self._n_written, self._n_letters = on_event, 0, 0
        self._text = TextAssembler(id_bytes, sampling.stop, min_tokens=sampling.min_tokens)

    @property
    def late(self) -> frozenset[int]:
        """Ids that may not be drawn before `min_tokens`."""
        return (self.ends | self.request.sampling.stop_ids) if self.request.sampling.min_tokens else frozenset()

    def n_chunks(self, chunk_len: int) -> int:
        return -(-(len(self.to_read) - self.n_read) // chunk_len)

    def next_chunk(self, chunk_len: int) -> list[int]:
        return self.to_read[self.n_read : self.n_read + chunk_len]

    def tell_prompt_read(self) -> None:
        logprobs = None
        if self.request.prompt_logprobs:
            logprobs = tuple(self.logprobs[: len(self.request.prompt)])
        self._emit(PromptRead(n_tokens=len(self.request.prompt), n_cached=self.n_cached, logprobs=logprobs))

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[Choice]] | None
    ) -> tuple[int, FinishReason | None, str | int | None]:
        """Takes what was drawn up to where the request ends, and tells it: how many tokens, and why and by what it ended."""
        sampling, n = self.request.sampling, 0
        reason: FinishReason | None = None
        stopped_by: str | int | None = None
        for token in tokens:
            n += 1
            self._n_written += 1
            enough = self._n_written >= sampling.min_tokens
            if enough and (token in self.ends or token in sampling.stop_ids):
                reason, stopped_by = "stop", token
                break
            self._text.feed(token)
            if self.matcher is not None:
                self.matcher.advance(token)
            if self._text.stopped is not None:
                reason, stopped_by = "stop", self._text.stopped
            elif self.matcher is not None and self.matcher.is_finished:
                reason = "stop"
            elif self._n_written >= sampling.max_tokens:
                reason = "length"
            if reason is not None:
                break
        text, offsets = self._text.take()
        if reason is not None:
            text += self._text.close()
            offsets = (*offsets, *[self._n_letters + len(text)] * (n - len(offsets)))  # an id that ends it has no text
        self._n_letters += len(text)
        choices = tuple(Choice(token, value) for token, value in zip(tokens[:n], logprobs[:n], strict=True))
        asked = sampling.top_logprobs
        likeliest = tuple(tuple(row[:asked]) for row in top[:n]) if top is not None and asked else ()
        self._emit(Produced(tokens=choices, top=likeliest, text=text, offsets=offsets))
        return n, reason, stopped_by

    def finish(
        self, reason: FinishReason, stopped_by: str | int | None = None, state: Any = None, error: str | None = None
    ) -> None:
        assert not self.is_done, f"{self.request.id} ended twice"
        self.is_done = True
        self.memory = self.seat = None
        self._emit(
            Finished(
                reason=reason,
                stopped_by=stopped_by,
                n_prompt=len(self.request.prompt),
                n_tokens=self._n_written,
                state=state,
                error=error,
            )
        )

    @property
    def n_tokens_after(self) -> int:
        """Of the whole conversation so far, its last token and leading end id included."""
        return self.n_before + len(self.to_read) + 1 + self._n_written

    def _emit(self, event: Event) -> None:
        self._on_event(event)
