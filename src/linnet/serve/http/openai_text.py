"""/v1/completions and /v1/chat/completions, complete or streamed. They differ only in the prompt and the response formatter."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from anyio import to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from linnet.core.errors import invalid
from linnet.serve.http.build_requests import (
    StartState,
    acquire_session,
    build_requests,
    checked_prompt,
    commit_session,
    encode,
    encode_chat,
    text_sampling,
)
from linnet.serve.http.errors import of_ending
from linnet.serve.http.formatters import NOTHING, ChatVoice, CompletionVoice, Ending, ResponseFormatter
from linnet.serve.http.limits import read_json
from linnet.serve.http.model import Model
from linnet.serve.http.results import ResultStream, merge
from linnet.serve.http.schemas import ChatRequest, CompletionRequest, TextRequest
from linnet.serve.http.service import Service
from linnet.serve.http.sse import DONE, EventStream, cancel_on_disconnect, event, with_error_event
from linnet.serve.request import Event, Finished, PrefillDone, Sampling, TokensEvent

SMALL_ANSWER = 4096
"""Tokens, including top log-probabilities. Larger answers are serialized in a thread, so that the event loop is not blocked."""
DEFAULT_TOKENS = 16
"""Default of max_tokens, as in OpenAI's completions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A validated call."""

    model: Model
    ask: TextRequest
    voice: ResponseFormatter
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    n: int
    best_of: int
    start: StartState
    shows_prompt: bool
    prompt_logprobs: bool
    is_scoring: bool
    """Only the prompt is returned (max_tokens 0 with echo). The engine generates one token, which is discarded."""


async def completions(service: Service, http: HttpRequest) -> Response:
    ask = await read_json(http, CompletionRequest, service.limits, state_bytes=service.most_state_bytes)
    model = service.model(ask.model)
    given = _given(ask, service)
    n = ask.n or 1
    best_of = ask.best_of or n
    is_scoring = _check_completion(ask, n, best_of)
    max_tokens = 1 if is_scoring else DEFAULT_TOKENS if ask.max_tokens is None else ask.max_tokens
    sampling = text_sampling(ask, model, service.limits, max_tokens=max_tokens, top_logprobs=ask.logprobs or 0)
    start = await _start(model, ask, len(given) * best_of, http.scope["state"]["request_id"])
    try:
        prompts = await _prompts(given, model, service, continues=start.n_tokens > 0)
    except BaseException:
        start.release()
        raise
    voice = CompletionVoice(
        model.tokenizer,
        ask.logprobs,
        bool(ask.return_token_ids),
        [prompt for prompt in prompts for _ in range(best_of)] if ask.echo else None,
        continues=start.state is not None,
        is_scoring=is_scoring,
    )
    job = Job(
        model=model,
        ask=ask,
        voice=voice,
        prompts=prompts,
        sampling=sampling,
        n=n,
        best_of=best_of,
        start=start,
        shows_prompt=bool(ask.echo),
        prompt_logprobs=bool(ask.echo) and ask.logprobs is not None,
        is_scoring=is_scoring,
    )
    return await _answer(service, http, job)


async def chat(service: Service, http: HttpRequest) -> Response:
    ask = await read_json(http, ChatRequest, service.limits, state_bytes=service.most_state_bytes)
    model = service.model(ask.model)
    if ask.top_logprobs and not ask.logprobs:
        raise invalid("top_logprobs", ask.top_logprobs, "omitted unless logprobs is true", "set logprobs to true")
    if ask.max_tokens is not None and ask.max_completion_tokens is not None:
        raise invalid("max_tokens", ask.max_tokens, "omitted if max_completion_tokens is given", "give one of the two")
    asked = ask.max_tokens if ask.max_completion_tokens is None else ask.max_completion_tokens
    max_tokens = min(service.limits.chat_tokens, service.limits.max_tokens) if asked is None else asked
    stops, stop_ids = model.template.stops(model.tokenizer)
    sampling = text_sampling(
        ask,
        model,
        service.limits,
        max_tokens=max_tokens,
        top_logprobs=ask.top_logprobs or 0,
        more_stops=stops,
        more_stop_ids=stop_ids,
    )
    n = ask.n or 1
    messages = [(message.role, message.text) for message in ask.messages]
    start = await _start(model, ask, n, http.scope["state"]["request_id"])
    try:
        last = start.state.last if start.n_tokens > 0 else None
        prompt = await encode_chat(model, messages, service.limits, last=last)
        if last is None and ask.add_special_tokens is not False and prompt[:1] == (model.bos_id,):
            prompt = prompt[1:]  # the template wrote the BOS id, which the engine prepends
    except BaseException:
        start.release()
        raise
    job = Job(
        model=model,
        ask=ask,
        voice=ChatVoice(model.tokenizer, bool(ask.logprobs), bool(ask.return_token_ids)),
        prompts=[prompt],
        sampling=sampling,
        n=n,
        best_of=n,
        start=start,
        shows_prompt=False,
        prompt_logprobs=False,
        is_scoring=False,
    )
    return await _answer(service, http, job)


def _given(ask: CompletionRequest, service: Service) -> Sequence[str | Sequence[int]]:
    given = _several(ask.prompt)
    if len(given) > service.limits.answers:  # before any work is done
        raise invalid("prompt", f"{len(given)} prompts", f"at most {service.limits.answers}", "send several calls")
    return given


async def _prompts(
    given: Sequence[str | Sequence[int]], model: Model, service: Service, *, continues: bool
) -> list[tuple[int, ...]]:
    limits = service.limits
    return [
        await encode(model, one, limits, continues=continues)
        if isinstance(one, str)
        else checked_prompt(one, model, limits)
        for one in given
    ]


def _several(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> Sequence[str | Sequence[int]]:
    """Return the prompts of a call. A list of ids is one prompt; other lists are several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [one for one in prompt if isinstance(one, int)]
    return [ids] if ids or not prompt else [one for one in prompt if not isinstance(one, int)]


def _check_completion(ask: CompletionRequest, n: int, best_of: int) -> bool:
    """Validate a completion request, and return whether only the prompt is scored."""
    if best_of < n:
        raise invalid("best_of", best_of, f"at least n ({n})", "omit it")
    if best_of > n and ask.stream:
        raise invalid(
            "best_of", best_of, "n in a stream, because the best answers are known only at the end", "omit stream"
        )
    if ask.max_tokens != 0:
        return False
    if not ask.echo or ask.session or ask.return_state:
        raise invalid(
            "max_tokens", 0, "at least 1, except with echo and without a session", "request at least one token"
        )
    return True


async def _start(model: Model, ask: TextRequest, n_answers: int, call: str) -> StartState:
    if n_answers > 1 and (ask.session is not None or ask.return_state):
        raise invalid("the number of answers", n_answers, "1 if a state is kept", "fork the session for each answer")
    return await acquire_session(model, ask, call)


async def _answer(service: Service, http: HttpRequest, job: Job) -> Response:
    """Run a call. Its session is held from before this to the end of the answer."""
    id = f"{job.voice.prefix}-{uuid.uuid4().hex}"
    try:
        keeps = job.start.session is not None or bool(job.ask.return_state)
        requests = build_requests(
            service,
            job.ask,
            id,
            job.prompts,
            job.sampling,
            job.best_of,
            state=job.start.state,
            return_state=keeps,
            prompt_logprobs=job.prompt_logprobs,
            truncate_prompt=bool(job.ask.truncate_prompt),
            add_special_tokens=job.ask.add_special_tokens is not False,
            shows_prompt=job.shows_prompt,
        )
        answers = await service.submit(job.model, requests)
    except BaseException:
        job.start.release()
        raise

    def close() -> None:
        answers.close()
        job.start.release()

    request_id = http.scope["state"]["request_id"]
    run = _Run(job, answers, id, request_id)
    if job.ask.stream:
        return EventStream(with_error_event(run.stream(), request_id), close)
    try:
        return Response(await cancel_on_disconnect(http.receive, run.whole()), media_type="application/json")
    finally:
        close()


class _Run:
    """One running call."""

    def __init__(self, job: Job, answers: ResultStream, id: str, request_id: str) -> None:
        self._job, self._answers, self._request_id = job, answers, request_id
        self._base = {
            "id": id,
            "created": int(time.time()),
            "model": job.model.name,
            "system_fingerprint": job.model.fingerprint,
        }
        self._n_cached = self._n_produced = self._n_truncated = 0
        self._state: str | None = None

    async def whole(self) -> bytes:
        job = self._job
        told: list[list[Event]] = [[] for _ in range(len(job.prompts) * job.best_of)]
        async for i, event_ in self._answers.events():
            told[i].append(event_)
            await self._note(i, event_)
        n_entries = sum(map(len, job.prompts)) + self._n_produced * (1 + job.sampling.top_logprobs)
        if n_entries <= SMALL_ANSWER:
            return self._written(told)
        return await to_thread.run_sync(self._written, told)

    def _written(self, told: Sequence[Sequence[Event]]) -> bytes:
        job = self._job
        collected = [_Collected.of(i, events) for i, events in enumerate(told)]
        choices = []
        for p in range(len(job.prompts)):
            best = collected[p * job.best_of : (p + 1) * job.best_of]
            if job.best_of > job.n:
                best = sorted(best, key=_Collected.mean_logprob, reverse=True)[: job.n]
            choices += [self._whole_choice(one) for one in best]
        choices = [{**choice, "index": index} for index, choice in enumerate(choices)]
        body = {**self._base, "object": job.voice.whole_object, "choices": choices, "usage": self._usage()}
        return bytes(JSONResponse(body if self._state is None else {**body, "state": self._state}).body)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for i, event_ in self._answers.events():
            await self._note(i, event_)
            choice = self._chunk_choice(i, event_)
            if choice is not None:
                yield self._chunk([choice])
        if self._state is not None:
            yield self._chunk([], state=self._state)
        if self._wants_usage:
            yield self._chunk([], usage=self._usage())
        yield DONE

    async def _note(self, i: int, event_: Event) -> None:
        if isinstance(event_, PrefillDone):
            self._job.voice.note(i, event_)
            if i % self._job.best_of == 0:
                self._n_cached += event_.n_cached
                self._n_truncated += event_.n_truncated
            if self._n_truncated:
                self._base["prompt_tokens_cut"] = self._n_truncated
        if isinstance(event_, Finished):
            problem = of_ending(event_, self._request_id)
            if problem is not None:
                raise problem
            self._n_produced += 0 if self._job.is_scoring else event_.n_tokens
            self._state = await commit_session(
                self._job.model, self._job.start, event_, bool(self._job.ask.return_state)
            )

    def _chunk_choice(self, i: int, event_: Event) -> Mapping[str, Any] | None:
        voice = self._job.voice
        match event_:
            case PrefillDone():
                return voice.opening(i, event_)
            case TokensEvent():
                return None if self._job.is_scoring else voice.piece(i, event_)
            case Finished():
                return voice.ending(i, self._ending(event_))

    def _whole_choice(self, one: _Collected) -> Mapping[str, Any]:
        produced = NOTHING if self._job.is_scoring else one.produced
        return self._job.voice.whole(one.i, one.read, produced, self._ending(one.finished))

    def _ending(self, finished: Finished) -> Ending:
        return "stop" if finished.reason == "stop" and not self._job.is_scoring else "length"

    def _chunk(self, choices: list[Mapping[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        return event({**self._base, "object": self._job.voice.chunk_object, "choices": choices, **usage, **more})

    @property
    def _wants_usage(self) -> bool:
        return bool(self._job.ask.stream_options and self._job.ask.stream_options.include_usage)

    def _usage(self) -> Mapping[str, Any]:
        n_prompt = sum(map(len, self._job.prompts)) - self._n_truncated
        cut = {"prompt_tokens_cut": self._n_truncated} if self._n_truncated else {}
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self._n_produced,
            "total_tokens": n_prompt + self._n_produced,
            "prompt_tokens_details": {"cached_tokens": self._n_cached},
            **cut,
        }


@dataclasses.dataclass(frozen=True)
class _Collected:
    """All events of one request, merged."""

    i: int
    read: PrefillDone | None
    produced: TokensEvent
    finished: Finished

    @staticmethod
    def of(i: int, events: Sequence[Event]) -> _Collected:
        read, produced, finished = None, NOTHING, None
        for one in merge(events):
            match one:
                case PrefillDone():
                    read = one
                case TokensEvent():
                    produced = one
                case Finished():
                    finished = one
        assert finished is not None
        return _Collected(i, read, produced, finished)

    def mean_logprob(self) -> float:
        tokens = self.produced.tokens
        return sum(choice.logprob for choice in tokens) / max(1, len(tokens))
