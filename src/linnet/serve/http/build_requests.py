"""Builds engine requests from the fields of an API call: ids, sampling settings, seeds, and the initial state."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from anyio import to_thread

from linnet.core.errors import invalid
from linnet.serve.http.limits import Limits
from linnet.serve.http.model import Model
from linnet.serve.http.schemas import PlainFormat, SamplingRequest, TextRequest
from linnet.serve.http.service import Service
from linnet.serve.request import MAX_SEED, Constraint, Finished, Request, Sampling

SMALL_TEXT = 1 << 15
"""Bytes. Longer texts are tokenized in a thread, so that the event loop is not blocked."""
PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "typical_p")
PASSED_ON_TEXT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias")


class SessionLease:
    """A call's exclusive hold on a session. Released exactly once, because the next call may acquire it immediately."""

    def __init__(self, model: Model, id: str, call: str) -> None:
        self.id, self._sessions, self._is_held = id, model.sessions, True
        self._sessions.acquire(id, call)

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._sessions.release(self.id)


@dataclasses.dataclass(frozen=True)
class StartState:
    """The state that the answers continue from."""

    state: Any = None
    n_tokens: int = 0
    session: SessionLease | None = None

    def release(self) -> None:
        if self.session is not None:
            self.session.release()


async def encode(model: Model, text: str, limits: Limits, *, continues: bool = False) -> tuple[int, ...]:
    """Tokenize a prompt and check its length. `continues`: the text continues a session that is not empty."""
    data = text.encode()
    encoded = functools.partial(model.tokenizer.encode, data, continues=continues)
    ids = encoded() if len(data) <= SMALL_TEXT else await to_thread.run_sync(encoded)
    return checked_prompt(ids.tolist(), model, limits)


async def encode_chat(
    model: Model, messages: Sequence[tuple[str, str]], limits: Limits, *, last: int | None
) -> tuple[int, ...]:
    """Apply the chat template and check the prompt's length. `last`: the last id of a session that the messages continue."""
    encoded = functools.partial(model.template.encode, messages, model.tokenizer, last=last)
    is_small = sum(len(content.encode()) for _, content in messages) <= SMALL_TEXT
    ids = encoded() if is_small else await to_thread.run_sync(encoded)
    return checked_prompt(ids, model, limits)


def checked_prompt(ids: Sequence[int], model: Model, limits: Limits) -> tuple[int, ...]:
    if len(ids) > limits.prompt_tokens:
        raise invalid(
            "prompt",
            f"{len(ids)} tokens",
            f"at most {limits.prompt_tokens} tokens",
            "shorten it, or send it in parts with a session",
        )
    check_ids("prompt", ids, model.n_vocab)
    return tuple(ids)


def check_ids(field: str, ids: Iterable[int] | None, n_vocab: int) -> None:
    worst = max(ids or (), default=0)
    if worst >= n_vocab:
        raise invalid(
            f"a token id of {field}", worst, f"an id of the vocabulary, 0 to {n_vocab - 1}", "use /v1/tokenize"
        )


def base_sampling(ask: SamplingRequest, **more: Any) -> Sampling:
    given = {name: getattr(ask, name) for name in PASSED_ON if getattr(ask, name) is not None}
    seed = secrets.randbelow(MAX_SEED + 1) if ask.seed is None else ask.seed
    return Sampling(**given, seed=seed, **more)


def text_sampling(
    ask: TextRequest,
    model: Model,
    limits: Limits,
    *,
    max_tokens: int,
    top_logprobs: int,
    more_stops: tuple[str, ...] = (),
    more_stop_ids: frozenset[int] = frozenset(),
) -> Sampling:
    """Build the sampling settings of a text request. `more_stops`, `more_stop_ids`: those of the chat template."""
    if max_tokens > limits.max_tokens:
        raise invalid("max_tokens", max_tokens, f"at most {limits.max_tokens}", "request fewer tokens")
    for field in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        check_ids(field, getattr(ask, field), model.n_vocab)
    given = {name: getattr(ask, name) for name in PASSED_ON_TEXT if getattr(ask, name) is not None}
    stop = [ask.stop] if isinstance(ask.stop, str) else ask.stop or []
    return base_sampling(
        ask,
        **given,
        allowed=None if ask.allowed_token_ids is None else frozenset(ask.allowed_token_ids),
        banned=frozenset(ask.banned_token_ids or ()),
        stop=tuple(dict.fromkeys((*more_stops, *stop))),
        stop_ids=more_stop_ids | frozenset(ask.stop_token_ids or ()),
        ignore_eos=bool(ask.ignore_eos),
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        constraint=constraint(ask),
    )


def constraint(ask: TextRequest) -> Constraint | None:
    """Return the request's constraint, of which there may be at most one."""
    asked: list[Constraint] = []
    if ask.regex is not None:
        asked.append(Constraint(kind="regex", grammar=ask.regex))
    if ask.grammar is not None:
        asked.append(Constraint(kind="lark", grammar=ask.grammar))
    if isinstance(ask.response_format, PlainFormat):
        if ask.response_format.type == "json_object":
            asked.append(Constraint(kind="json_schema", grammar='{"type":"object"}'))
    elif ask.response_format is not None:
        try:
            schema = json.dumps(ask.response_format.json_schema.schema_, allow_nan=False)
        except ValueError:
            raise invalid("response_format", "NaN or infinity", "JSON", "use finite numbers") from None
        asked.append(Constraint(kind="json_schema", grammar=schema))
    if len(asked) > 1:
        raise invalid(
            "the number of constraints", len(asked), "at most 1", "use one of response_format, regex and grammar"
        )
    return asked[0] if asked else None


def build_requests(
    service: Service,
    ask: SamplingRequest,
    id: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    n_each: int,
    **more: Any,
) -> list[Request]:
    """Build `n_each` requests per prompt. A prompt's i-th answer does not depend on the other prompts of the call."""
    limits = service.limits
    if len(prompts) * n_each > limits.answers:
        got = f"{len(prompts)} prompts x {n_each}"
        raise invalid("the number of answers", got, f"at most {limits.answers}", "send several calls")
    deadline = ask.deadline_seconds
    if deadline is not None and deadline > limits.deadline_seconds:
        raise invalid("deadline_seconds", deadline, f"at most {limits.deadline_seconds:g}", "use a smaller value")
    return [
        Request(
            id=f"{id}-{p * n_each + i}",
            prompt=prompt,
            sampling=dataclasses.replace(sampling, seed=(sampling.seed + i) % (MAX_SEED + 1)),
            priority=ask.priority or 0,
            deadline=None if deadline is None else service.clock() + deadline,
            use_prefix_cache=ask.cache is not False,
            **more,
        )
        for p, prompt in enumerate(prompts)
        for i in range(n_each)
    ]


async def acquire_session(model: Model, ask: TextRequest, call: str) -> StartState:
    """Return the initial state, and hold the session, if there is one, until `commit_session` or `StartState.release`."""
    if ask.session is not None and ask.state is not None:
        raise invalid("state", "given with a session", "omitted then", "give one of the two")
    if ask.session is not None:
        held = SessionLease(model, ask.session, call)
        try:
            session = await to_thread.run_sync(model.sessions.get, held.id)
        except BaseException:
            held.release()
            raise
        return StartState(session.state, session.n_tokens, held)
    if ask.state is not None:
        try:
            data = base64.b64decode(ask.state, validate=True)
        except (binascii.Error, ValueError):
            raise invalid("state", "not base64", "as returned by `return_state`", "send it unchanged") from None
        session = await to_thread.run_sync(model.sessions.unpack, data)
        return StartState(session.state, session.n_tokens)
    return StartState()


async def commit_session(model: Model, start: StartState, finished: Finished, return_state: bool) -> str | None:
    """Store the final state in the session and release it, before the client sees the end and can send the next call. Returns the
    state in base64 if `return_state`."""
    if start.session is not None:
        n_tokens = start.n_tokens + finished.n_prompt + finished.n_tokens
        await to_thread.run_sync(model.sessions.put, start.session.id, finished.state, n_tokens)
        start.release()
    if not return_state:
        return None
    return base64.b64encode(await to_thread.run_sync(model.sessions.pack, finished.state)).decode()
