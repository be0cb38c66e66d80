"""One request in the engine: the prompt left to read, the text generated, and when it ends. Uses neither the device nor threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from linnet.core.errors import invalid
from linnet.core.special_tokens import TextRules
from linnet.models.bos import empty_prompt, in_front
from linnet.models.detokenize import TextAssembler
from linnet.serve.backend import SlotState
from linnet.serve.grammar import Matcher
from linnet.serve.request import (
    Event,
    Finished,
    FinishReason,
    OnEvent,
    PrefillDone,
    Request,
    TokenLogprob,
    TokensEvent,
    TooLong,
)


class TokenJob:
    def __init__(
        self,
        request: Request,
        on_event: OnEvent,
        *,
        end_id: int,
        bos_id: int | None,
        context: int | None,
        text_rules: TextRules,
        matcher: Matcher | None,
    ) -> None:
        self.request, self.matcher = request, matcher
        is_new = request.state is None
        first = in_front(bos_id, request.add_special_tokens) if is_new else (request.state.last,)
        if not first and not request.prompt:
            raise empty_prompt(bos_id)
        self.n_front: int = len(first) if is_new else request.state.n_front
        """BOS ids at the start of the conversation: 1 or 0."""
        self.n_before = 0 if is_new else request.state.n_tokens - 1
        """Tokens that the initial state had read."""
        prompt, self.max_tokens = _fit_context(request, self.n_before, len(first), context)
        self.n_truncated = len(request.prompt) - len(prompt)
        """Tokens truncated from the start of the prompt to fit the context."""
        self.prompt = prompt
        """The prompt after truncation."""
        self.n_prompt = len(prompt)
        *self.to_read, self.last = (*first, *prompt)
        self.memory: Any = None if request.state is None else request.state.memory
        self.n_read = 0
        """Tokens of `to_read` that were read."""
        self.n_cached = 0
        self.keys: list[bytes] = []
        """Prefix cache keys of the complete chunks of `to_read`."""
        self.logprobs: list[float] = []
        self.top: list[tuple[TokenLogprob, ...]] = []
        """Log-probabilities and top log-probabilities of the prompt."""
        self.slot_state: SlotState | None = None
        self.slot: int | None = None
        self.n_dispatched = 0
        """Tokens for which a dispatch was started; none are needed beyond `max_tokens`."""
        self.is_done = False
        sampling = request.sampling
        self.eos_ids = frozenset() if sampling.ignore_eos else frozenset({end_id})
        self._on_event, self._n_written, self._n_characters = on_event, 0, 0
        # Leading spaces are kept if the answer must match a grammar, or continues an answer without a prompt in between.
        self._text = TextAssembler(
            text_rules,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            before=prompt if request.shows_prompt else (),
            continues=matcher is not None
            or (not is_new and (request.shows_prompt or not (prompt or request.appended))),
        )

    @property
    def min_token_ids(self) -> frozenset[int]:
        """Ids that may not be sampled before `min_tokens`."""
        return (self.eos_ids | self.request.sampling.stop_ids) if self.request.sampling.min_tokens else frozenset()

    def allowed_next(self) -> Bool[np.ndarray, " vocab"]:
        """Return the ids that the grammar allows, without those in `min_token_ids` before `min_tokens`."""
        assert self.matcher is not None
        allowed = self.matcher.mask()
        if self._n_written < self.request.sampling.min_tokens:
            allowed[list(self.min_token_ids)] = False
        return allowed

    def n_chunks(self, chunk_len: int) -> int:
        return -(-(len(self.to_read) - self.n_read) // chunk_len)

    def next_chunk(self, chunk_len: int) -> list[int]:
        return self.to_read[self.n_read : self.n_read + chunk_len]

    def notify_prefill_done(self) -> None:
        n = self.n_prompt
        # Without a token before it, the first token of the prompt is not predicted.
        unpredicted = len(self.to_read) + 1 == n
        logprobs: tuple[float | None, ...] | None = None
        if self.request.prompt_logprobs:
            logprobs = ((None,) * unpredicted + tuple(self.logprobs))[:n]
        top = (((),) * unpredicted + tuple(self.top))[:n] if self.top else ()
        self._emit(
            PrefillDone(n_tokens=n, n_cached=self.n_cached, n_truncated=self.n_truncated, logprobs=logprobs, top=top)
        )

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[TokenLogprob]] | None
    ) -> tuple[int, FinishReason | None, str | int | None]:
        """Accept sampled tokens up to the end of the request and emit them. Returns how many were accepted, the finish reason, and
        the stop string or id that ended it."""
        sampling, n = self.request.sampling, 0
        reason: FinishReason | None = None
        stopped_by: str | int | None = None
        for token in tokens:
            n += 1
            self._n_written += 1
            may_stop = self._n_written >= sampling.min_tokens
            if may_stop and (token in self.eos_ids or token in sampling.stop_ids):
                reason, stopped_by = "stop", token
                break
            self._text.feed(token)
            if self.matcher is not None:
                self.matcher.advance(token)
            if self._text.stopped is not None:
                reason, stopped_by = "stop", self._text.stopped
            elif self.matcher is not None and self.matcher.is_finished:
                reason = "stop"
            elif self._n_written >= self.max_tokens:
                reason = "length"
            if reason is not None:
                break
        text, offsets = self._text.take()
        if reason is not None:
            text += self._text.close()
            offsets = (*offsets, *[self._n_characters + len(text)] * (n - len(offsets)))  # a stop id has no text
        self._n_characters += len(text)
        accepted = tuple(map(TokenLogprob, tokens[:n], logprobs[:n]))
        k = sampling.top_logprobs
        alternatives = tuple(tuple(row[:k]) for row in top[:n]) if top is not None and k else ()
        self._emit(TokensEvent(tokens=accepted, top=alternatives, text=text, offsets=offsets))
        return n, reason, stopped_by

    def finish(
        self, reason: FinishReason, stopped_by: str | int | None = None, state: Any = None, error: str | None = None
    ) -> None:
        assert not self.is_done, f"{self.request.id} ended twice"
        self.is_done = True
        self.memory = self.slot_state = None
        self._emit(
            Finished(
                reason=reason,
                stopped_by=stopped_by,
                n_prompt=self.n_prompt,
                n_tokens=self._n_written,
                state=state,
                error=error,
            )
        )

    @property
    def n_tokens_after(self) -> int:
        """Tokens of the conversation so far, including the last token and the BOS id."""
        return self.n_before + len(self.to_read) + 1 + self._n_written

    def _emit(self, event: Event) -> None:
        self._on_event(event)


def _fit_context(request: Request, n_before: int, n_first: int, context: int | None) -> tuple[tuple[int, ...], int]:
    """Return the prompt and the maximum length of the answer that fit the context. The last token of an answer is not read.
    `n_first`: number of tokens read before the prompt (the BOS id, or the last token of the state)."""
    prompt, max_tokens = request.prompt, request.sampling.max_tokens
    if context is None:
        return prompt, max_tokens
    room = context - n_before - n_first
    if room < min(1, len(prompt)):
        needs = f"shorter: the context of {context} tokens (prompt and answer) is full"
        raise _too_long("the session", f"{n_before} tokens long", needs, "start another session")
    if len(prompt) > room:
        if not request.truncate_prompt:
            needs = f"at most {room}: the context is {context} tokens (prompt and answer)"
            fix = "shorten it, or set truncate_prompt to drop tokens at its start"
            raise _too_long("the prompt", f"{len(prompt)} tokens", needs, fix)
        # Reserve tokens for the answer, but at least half of the context for the prompt.
        prompt = prompt[-max(room - max_tokens + 1, (room + 1) // 2) :]
    return prompt, min(max_tokens, room - len(prompt) + 1)


def _too_long(field: str, got: str, needs: str, fix: str) -> TooLong:
    return TooLong(str(invalid(field, got, needs, fix)))
