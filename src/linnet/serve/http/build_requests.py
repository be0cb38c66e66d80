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
from linnet.serve.http.model import TokenModel
from linnet.serve.http.schemas import ApiRequest, PlainFormat, SamplingRequest, TextRequest
from linnet.serve.http.service import Service
from linnet.serve.request import MAX_SEED, Constraint, Finished, Request, Sampling

SMALL_TEXT = 1 << 15
"""Bytes. Longer texts are tokenized in a thread, so that the event loop is not blocked."""
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "typical_p")
TEXT_FIELDS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "logit_bias")


class SessionLease:
    """A call's exclusive use of a session. Released exactly once, because the next call may acquire it immediately."""

    def __init__(self, model: TokenModel, id: str, call: str) -> None:
        self.id, self._sessions, self._is_active = id, model.sessions, True
        self._sessions.acquire(id, call)

    def release(self) -> None:
        if self._is_active:
            self._is_active = False
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


async def encode(model: TokenModel, text: str, limits: Limits, *, continues: bool = False) -> tuple[int, ...]:
    """Tokenize a prompt and check its length. `continues`: the text continues a session that is not empty."""
    data = text.encode()
    encoded = functools.partial(model.tokenizer.encode, data, continues=continues)
    ids = encoded() if len(data) <= SMALL_TEXT else await to_thread.run_sync(encoded)
    return check_prompt(ids.tolist(), model, limits)


async def encode_chat(
    model: TokenModel, messages: Sequence[tuple[str, str]], limits: Limits, *, last: int | None
) -> tuple[int, ...]:
    """Apply the chat template and check the prompt's length. `last`: the last id of a session that the messages continue."""
    encoded = functools.partial(model.template.encode, messages, model.tokenizer, last=last)
    is_small = sum(len(content.encode()) for _, content in messages) <= SMALL_TEXT
    ids = encoded() if is_small else await to_thread.run_sync(encoded)
    return check_prompt(ids, model, limits)


def check_prompt(ids: Sequence[int], model: TokenModel, limits: Limits) -> tuple[int, ...]:
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
    largest = max(ids or (), default=0)
    if largest >= n_vocab:
        raise invalid(
            f"a token id of {field}", largest, f"an id of the vocabulary, 0 to {n_vocab - 1}", "use /v1/tokenize"
        )


def check_call(limits: Limits, n_inputs: int, n_each: int, deadline: float | None, inputs: str) -> None:
    """Check a call's number of answers and its deadline in seconds. `inputs`: name of what is answered, for the error."""
    if n_inputs * n_each > limits.answers:
        got = f"{n_inputs} {inputs} x {n_each}"
        raise invalid("the number of answers", got, f"at most {limits.answers}", "send several calls")
    if deadline is not None and deadline > limits.deadline_seconds:
        raise invalid("deadline_seconds", deadline, f"at most {limits.deadline_seconds:g}", "use a smaller value")


def given_fields(body: ApiRequest, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that the client gave; the others keep the engine's defaults."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def choose_seed(seed: int | None) -> int:
    return secrets.randbelow(MAX_SEED + 1) if seed is None else seed


def base_sampling(body: SamplingRequest, **more: Any) -> Sampling:
    return Sampling(**given_fields(body, SAMPLING_FIELDS), seed=choose_seed(body.seed), **more)


def text_sampling(
    body: TextRequest,
    model: TokenModel,
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
        check_ids(field, getattr(body, field), model.n_vocab)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return base_sampling(
        body,
        **given_fields(body, TEXT_FIELDS),
        allowed=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
        banned=frozenset(body.banned_token_ids or ()),
        stop=tuple(dict.fromkeys((*more_stops, *stop))),
        stop_ids=more_stop_ids | frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        constraint=build_constraint(body),
    )


def build_constraint(body: TextRequest) -> Constraint | None:
    """Return the request's constraint, of which there may be at most one."""
    constraints: list[Constraint] = []
    if body.regex is not None:
        constraints.append(Constraint(kind="regex", grammar=body.regex))
    if body.grammar is not None:
        constraints.append(Constraint(kind="lark", grammar=body.grammar))
    if isinstance(body.response_format, PlainFormat):
        if body.response_format.type == "json_object":
            constraints.append(Constraint(kind="json_schema", grammar='{"type":"object"}'))
    elif body.response_format is not None:
        try:
            schema = json.dumps(body.response_format.json_schema.schema_, allow_nan=False)
        except ValueError:
            raise invalid("response_format", "NaN or infinity", "JSON", "use finite numbers") from None
        constraints.append(Constraint(kind="json_schema", grammar=schema))
    if len(constraints) > 1:
        raise invalid(
            "the number of constraints", len(constraints), "at most 1", "use one of response_format, regex and grammar"
        )
    return constraints[0] if constraints else None


def build_requests(
    service: Service,
    body: SamplingRequest,
    id: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    n_each: int,
    **more: Any,
) -> list[Request]:
    """Build `n_each` requests per prompt. A prompt's i-th answer does not depend on the other prompts of the call."""
    deadline = body.deadline_seconds
    check_call(service.limits, len(prompts), n_each, deadline, "prompts")
    return [
        Request(
            id=f"{id}-{p * n_each + i}",
            prompt=prompt,
            sampling=dataclasses.replace(sampling, seed=(sampling.seed + i) % (MAX_SEED + 1)),
            priority=body.priority or 0,
            deadline=None if deadline is None else service.clock() + deadline,
            use_prefix_cache=body.cache is not False,
            **more,
        )
        for p, prompt in enumerate(prompts)
        for i in range(n_each)
    ]


async def acquire_session(model: TokenModel, body: TextRequest, call: str) -> StartState:
    """Return the initial state, and lease the session, if there is one, until `commit_session` or `StartState.release`."""
    if body.session is not None and body.state is not None:
        raise invalid("state", "given with a session", "omitted then", "give one of the two")
    if body.session is not None:
        lease = SessionLease(model, body.session, call)
        try:
            session = await to_thread.run_sync(model.sessions.get, lease.id)
        except BaseException:
            lease.release()
            raise
        return StartState(session.state, session.n_tokens, lease)
    if body.state is not None:
        try:
            data = base64.b64decode(body.state, validate=True)
        except (binascii.Error, ValueError):
            raise invalid("state", "not base64", "as returned by `return_state`", "send it unchanged") from None
        session = await to_thread.run_sync(model.sessions.unpack, data)
        return StartState(session.state, session.n_tokens)
    return StartState()


async def commit_session(model: TokenModel, start: StartState, finished: Finished, return_state: bool) -> str | None:
    """Store the final state in the session and release it, before the client sees the end and can send the next call. Returns the
    state in base64 if `return_state`."""
    if start.session is not None:
        n_tokens = start.n_tokens + finished.n_prompt + finished.n_tokens
        await to_thread.run_sync(model.sessions.put, start.session.id, finished.state, n_tokens)
        start.release()
    if not return_state:
        return None
    return base64.b64encode(await to_thread.run_sync(model.sessions.pack, finished.state)).decode()
