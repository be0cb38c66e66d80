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
    check_prompt,
    commit_session,
    encode,
    encode_chat,
    text_sampling,
)
from linnet.serve.http.errors import check_finished
from linnet.serve.http.formatters import (
    NO_TOKENS,
    ApiFinishReason,
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
)
from linnet.serve.http.limits import read_json
from linnet.serve.http.model import TokenModel
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
class TextCall:
    """A validated call."""

    model: TokenModel
    body: TextRequest
    formatter: ResponseFormatter
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    n: int
    best_of: int
    start: StartState
    shows_prompt: bool = False
    prompt_logprobs: bool = False
    is_scoring: bool = False
    """Only the prompt is returned (max_tokens 0 with echo). The engine generates one token, which is discarded."""


async def completions(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, CompletionRequest, service.limits, state_bytes=service.max_state_bytes)
    model = service.model(body.model)
    raw_prompts = _split_prompts(body, service)
    n = body.n or 1
    best_of = body.best_of or n
    is_scoring = _check_completion(body, n, best_of)
    max_tokens = 1 if is_scoring else DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = text_sampling(body, model, service.limits, max_tokens=max_tokens, top_logprobs=body.logprobs or 0)
    start = await _start(model, body, len(raw_prompts) * best_of, http.scope["state"]["request_id"])
    try:
        prompts = await _prompts(raw_prompts, model, service, continues=start.n_tokens > 0)
    except BaseException:
        start.release()
        raise
    formatter = CompletionFormatter(
        model.tokenizer,
        body.logprobs,
        bool(body.return_token_ids),
        [prompt for prompt in prompts for _ in range(best_of)] if body.echo else None,
        continues=start.state is not None,
        is_scoring=is_scoring,
    )
    call = TextCall(
        model=model,
        body=body,
        formatter=formatter,
        prompts=prompts,
        sampling=sampling,
        n=n,
        best_of=best_of,
        start=start,
        shows_prompt=bool(body.echo),
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        is_scoring=is_scoring,
    )
    return await _answer(service, http, call)


async def chat(service: Service, http: HttpRequest) -> Response:
    body = await read_json(http, ChatRequest, service.limits, state_bytes=service.max_state_bytes)
    model = service.model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", body.top_logprobs, "omitted unless logprobs is true", "set logprobs to true")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", body.max_tokens, "omitted if max_completion_tokens is given", "give one of the two")
    requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = min(service.limits.chat_tokens, service.limits.max_tokens) if requested is None else requested
    stops, stop_ids = model.template.stops(model.tokenizer)
    sampling = text_sampling(
        body,
        model,
        service.limits,
        max_tokens=max_tokens,
        top_logprobs=body.top_logprobs or 0,
        more_stops=stops,
        more_stop_ids=stop_ids,
    )
    n = body.n or 1
    messages = [(message.role, message.text) for message in body.messages]
    start = await _start(model, body, n, http.scope["state"]["request_id"])
    try:
        last = start.state.last if start.n_tokens > 0 else None
        prompt = await encode_chat(model, messages, service.limits, last=last)
        if last is None and body.add_special_tokens is not False and prompt[:1] == (model.bos_id,):
            prompt = prompt[1:]  # the template wrote the BOS id, which the engine prepends
    except BaseException:
        start.release()
        raise
    call = TextCall(
        model=model,
        body=body,
        formatter=ChatFormatter(model.tokenizer, bool(body.logprobs), bool(body.return_token_ids)),
        prompts=[prompt],
        sampling=sampling,
        n=n,
        best_of=n,
        start=start,
    )
    return await _answer(service, http, call)


def _split_prompts(body: CompletionRequest, service: Service) -> Sequence[str | Sequence[int]]:
    raw_prompts = _as_list(body.prompt)
    if len(raw_prompts) > service.limits.answers:  # before any work is done
        raise invalid(
            "prompt", f"{len(raw_prompts)} prompts", f"at most {service.limits.answers}", "send several calls"
        )
    return raw_prompts


async def _prompts(
    raw_prompts: Sequence[str | Sequence[int]], model: TokenModel, service: Service, *, continues: bool
) -> list[tuple[int, ...]]:
    limits = service.limits
    return [
        await encode(model, one, limits, continues=continues)
        if isinstance(one, str)
        else check_prompt(one, model, limits)
        for one in raw_prompts
    ]


def _as_list(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> Sequence[str | Sequence[int]]:
    """Return the prompts of a call. A list of ids is one prompt; other lists are several."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [one for one in prompt if isinstance(one, int)]
    return [ids] if ids or not prompt else [one for one in prompt if not isinstance(one, int)]


def _check_completion(body: CompletionRequest, n: int, best_of: int) -> bool:
    """Validate a completion request, and return whether only the prompt is scored."""
    if best_of < n:
        raise invalid("best_of", best_of, f"at least n ({n})", "omit it")
    if best_of > n and body.stream:
        raise invalid(
            "best_of", best_of, "n in a stream, because the best answers are known only at the end", "omit stream"
        )
    if body.max_tokens != 0:
        return False
    if not body.echo or body.session or body.return_state:
        raise invalid(
            "max_tokens", 0, "at least 1, except with echo and without a session", "request at least one token"
        )
    return True


async def _start(model: TokenModel, body: TextRequest, n_answers: int, request_id: str) -> StartState:
    if n_answers > 1 and (body.session is not None or body.return_state):
        raise invalid("the number of answers", n_answers, "1 if a state is kept", "fork the session for each answer")
    return await acquire_session(model, body, request_id)


async def _answer(service: Service, http: HttpRequest, call: TextCall) -> Response:
    """Run a call. Its session is leased before this, until the end of the answer."""
    id = f"{call.formatter.prefix}-{uuid.uuid4().hex}"
    try:
        keeps_state = call.start.session is not None or bool(call.body.return_state)
        requests = build_requests(
            service,
            call.body,
            id,
            call.prompts,
            call.sampling,
            call.best_of,
            state=call.start.state,
            return_state=keeps_state,
            prompt_logprobs=call.prompt_logprobs,
            truncate_prompt=bool(call.body.truncate_prompt),
            add_special_tokens=call.body.add_special_tokens is not False,
            shows_prompt=call.shows_prompt,
        )
        results = await service.submit(call.model, requests)
    except BaseException:
        call.start.release()
        raise

    def close() -> None:
        results.close()
        call.start.release()

    request_id = http.scope["state"]["request_id"]
    run = _Run(call, results, id, request_id)
    if call.body.stream:
        return EventStream(with_error_event(run.stream(), request_id), close)
    try:
        return Response(await cancel_on_disconnect(http.receive, run.full()), media_type="application/json")
    finally:
        close()


class _Run:
    """One running call."""

    def __init__(self, call: TextCall, results: ResultStream, id: str, request_id: str) -> None:
        self._call, self._results, self._request_id = call, results, request_id
        self._base = {
            "id": id,
            "created": int(time.time()),
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
        }
        self._n_cached = self._n_generated = self._n_truncated = 0
        self._state: str | None = None

    async def full(self) -> bytes:
        call = self._call
        by_request: list[list[Event]] = [[] for _ in range(len(call.prompts) * call.best_of)]
        async for i, event_ in self._results.events():
            by_request[i].append(event_)
            await self._record(i, event_)
        n_entries = sum(map(len, call.prompts)) + self._n_generated * (1 + call.sampling.top_logprobs)
        if n_entries <= SMALL_ANSWER:
            return self._serialize(by_request)
        return await to_thread.run_sync(self._serialize, by_request)

    def _serialize(self, by_request: Sequence[Sequence[Event]]) -> bytes:
        call = self._call
        collected = [_Collected.of(i, events) for i, events in enumerate(by_request)]
        choices = []
        for p in range(len(call.prompts)):
            best = collected[p * call.best_of : (p + 1) * call.best_of]
            if call.best_of > call.n:
                best = sorted(best, key=_Collected.mean_logprob, reverse=True)[: call.n]
            choices += [self._full_choice(one) for one in best]
        choices = [{**choice, "index": index} for index, choice in enumerate(choices)]
        answer = {**self._base, "object": call.formatter.full_object, "choices": choices, "usage": self._usage()}
        return bytes(JSONResponse(answer if self._state is None else {**answer, "state": self._state}).body)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for i, event_ in self._results.events():
            await self._record(i, event_)
            choice = self._chunk_choice(i, event_)
            if choice is not None:
                yield self._chunk([choice])
        if self._state is not None:
            yield self._chunk([], state=self._state)
        if self._wants_usage:
            yield self._chunk([], usage=self._usage())
        yield DONE

    async def _record(self, i: int, event_: Event) -> None:
        if isinstance(event_, PrefillDone):
            self._call.formatter.note_prefill(i, event_)
            if i % self._call.best_of == 0:
                self._n_cached += event_.n_cached
                self._n_truncated += event_.n_truncated
            if self._n_truncated:
                self._base["prompt_tokens_cut"] = self._n_truncated
        if isinstance(event_, Finished):
            check_finished(event_, self._request_id)
            self._n_generated += 0 if self._call.is_scoring else event_.n_tokens
            self._state = await commit_session(
                self._call.model, self._call.start, event_, bool(self._call.body.return_state)
            )

    def _chunk_choice(self, i: int, event_: Event) -> Mapping[str, Any] | None:
        formatter = self._call.formatter
        match event_:
            case PrefillDone():
                return formatter.first_chunk(i, event_)
            case TokensEvent():
                return None if self._call.is_scoring else formatter.chunk(i, event_)
            case Finished():
                return formatter.last_chunk(i, self._finish_reason(event_))

    def _full_choice(self, one: _Collected) -> Mapping[str, Any]:
        tokens = NO_TOKENS if self._call.is_scoring else one.tokens
        return self._call.formatter.full(one.i, one.read, tokens, self._finish_reason(one.finished))

    def _finish_reason(self, finished: Finished) -> ApiFinishReason:
        return "stop" if finished.reason == "stop" and not self._call.is_scoring else "length"

    def _chunk(self, choices: list[Mapping[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        return event({**self._base, "object": self._call.formatter.chunk_object, "choices": choices, **usage, **more})

    @property
    def _wants_usage(self) -> bool:
        return bool(self._call.body.stream_options and self._call.body.stream_options.include_usage)

    def _usage(self) -> Mapping[str, Any]:
        n_prompt = sum(map(len, self._call.prompts)) - self._n_truncated
        cut = {"prompt_tokens_cut": self._n_truncated} if self._n_truncated else {}
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self._n_generated,
            "total_tokens": n_prompt + self._n_generated,
            "prompt_tokens_details": {"cached_tokens": self._n_cached},
            **cut,
        }


@dataclasses.dataclass(frozen=True)
class _Collected:
    """All events of one request, merged."""

    i: int
    read: PrefillDone | None
    tokens: TokensEvent
    finished: Finished

    @staticmethod
    def of(i: int, events: Sequence[Event]) -> _Collected:
        read, tokens, finished = None, NO_TOKENS, None
        for one in merge(events):
            match one:
                case PrefillDone():
                    read = one
                case TokensEvent():
                    tokens = one
                case Finished():
                    finished = one
        assert finished is not None
        return _Collected(i, read, tokens, finished)

    def mean_logprob(self) -> float:
        tokens = self.tokens.tokens
        return sum(choice.logprob for choice in tokens) / max(1, len(tokens))
