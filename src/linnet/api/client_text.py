"""Text over HTTP: the options of the clients, request bodies, and responses and streams as the results of `Run`."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linnet.api.client_http import EventDecoder, HttpRequest
from linnet.api.results import FinishReason, GeneratedText, Score
from linnet.api.text import TokenOptions
from linnet.core.errors import UserError, invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32

    Ids = Int32[np.ndarray, " n"]
    Prompt = str | Ids
    Prompts = list[str] | list[Ids]

Message = Mapping[str, Any]
"""A message of a conversation: `{"role": "user", "content": "..."}`."""


class ServedOptions(TokenOptions, total=False):
    """Keyword arguments of everything that generates text on a server: those of `Run.generate`, and those of the HTTP API, which
    docs/http-api.md describes."""

    min_tokens: int
    typical_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    regex: str
    grammar: str
    response_format: Mapping[str, Any]
    truncate_prompt: bool
    priority: int
    deadline_seconds: float
    cache: bool


class TurnOptions(ServedOptions, total=False):
    """Keyword arguments of `RemoteSession.generate` and `RemoteSession.chat`."""

    seed: int


class ChatOptions(TurnOptions, total=False):
    """Keyword arguments of `Client.chat`."""

    model: str
    state: bytes
    return_state: bool


class ClientOptions(ServedOptions, total=False):
    """Keyword arguments of `Client.generate`."""

    seed: int | Sequence[int]
    add_special_tokens: bool
    model: str
    state: bytes
    return_state: bool


@dataclasses.dataclass
class SessionInfo:
    """What a client knows of a session."""

    id: str
    model: str
    n_tokens: int
    state_bytes: int
    pending: str = ""
    """Appended text, which the next turn sends."""
    is_open: bool = True

    def check(self) -> None:
        if not self.is_open:
            raise UserError("the session is closed. Fix: use it inside its `with` block, or make another one.")

    def __str__(self) -> str:
        return f"RemoteSession({self.id!r}, {self.n_tokens:,} tokens)" if self.is_open else "RemoteSession(closed)"

    def append(self, text: str) -> None:
        self.check()
        self.pending += check_text(text)


@dataclasses.dataclass(frozen=True)
class TextCall:
    """One call to an endpoint that generates text."""

    path: str
    body: Mapping[str, Any]
    seed: int
    end_ids: Mapping[str, int]
    """The EOS id of each model."""
    session: SessionInfo | None = None

    @property
    def request(self) -> HttpRequest:
        return HttpRequest(method="POST", path=self.path, json=self.body)

    @property
    def stream_request(self) -> HttpRequest:
        body = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        return HttpRequest(method="POST", path=self.path, json=body, is_stream=True)

    def parse(self, answer: Mapping[str, Any]) -> list[GeneratedText]:
        """Parse a complete response, and advance the session."""
        self.advance(answer["usage"])
        state = _parse_state(answer)
        return [self._parse_text(choice, answer["model"], state) for choice in answer["choices"]]

    def advance(self, usage: Mapping[str, Any]) -> None:
        """Count the tokens of a turn in its session, which has read the appended text."""
        if self.session is not None:
            self.session.n_tokens += usage["total_tokens"]
            self.session.pending = ""

    def _parse_text(self, choice: Mapping[str, Any], model: str, state: bytes | None) -> GeneratedText:
        text, ids, logprobs = _parse_choice(choice)
        reason = self.finish_reason(choice["finish_reason"], ids, model)
        return GeneratedText(text, token_ids=ids, logprobs=logprobs, finish_reason=reason, seed=self.seed, state=state)

    def finish_reason(self, given: str, ids: Sequence[int], model: str) -> FinishReason:
        """Return the finish reason as `Run` reports it: `end` for EOS, for which the server reports `stop` too."""
        if given == "length":
            return "length"
        is_end = not self.body.get("ignore_eos") and ids and ids[-1] == self.end_ids.get(model)
        return "end" if is_end else "stop"


class TextStream:
    """Parses the events of a stream of text. Each piece is a list with one entry per prompt, None for prompts without new text."""

    def __init__(self, call: TextCall, n: int) -> None:
        self._call, self._events = call, EventDecoder()
        self._last_ids: list[Sequence[int]] = [()] * n
        self._reasons: dict[int, str] = {}
        self._model, self._state = "", None

    @property
    def request(self) -> HttpRequest:
        return self._call.stream_request

    @property
    def is_done(self) -> bool:
        return self._events.is_done

    def feed(self, data: bytes) -> Iterator[list[GeneratedText | None]]:
        for event in self._events.feed(data):
            self._model = event["model"]
            self._state = _parse_state(event) or self._state
            if event.get("usage") is not None:
                self._call.advance(event["usage"])
            for choice in event["choices"]:
                yield from self._pieces(choice)
        if self.is_done:
            yield [self._last_piece(i) for i in range(len(self._last_ids))]

    def _pieces(self, choice: Mapping[str, Any]) -> Iterator[list[GeneratedText | None]]:
        i = choice["index"]
        text, ids, logprobs = _parse_choice(choice)
        self._last_ids[i] = ids or self._last_ids[i]
        if choice["finish_reason"] is not None:
            self._reasons[i] = choice["finish_reason"]
        if text or ids:
            row: list[GeneratedText | None] = [None] * len(self._last_ids)
            row[i] = GeneratedText(text, token_ids=ids, logprobs=logprobs, seed=self._call.seed)
            yield row

    def _last_piece(self, i: int) -> GeneratedText:
        reason = self._call.finish_reason(self._reasons[i], self._last_ids[i], self._model)
        return GeneratedText("", finish_reason=reason, seed=self._call.seed, state=self._state)


def typed_dict_keys(cls: type[Any]) -> frozenset[str]:
    return cls.__optional_keys__ | cls.__required_keys__


def check_text(text: str) -> str:
    if not isinstance(text, str):
        raise invalid("the text", text, "a str", "convert it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid("the text", ascii(text), "valid Unicode, without lone surrogates", "remove them") from None
    return text


def check_prompts(prompt: Prompt | Prompts) -> list[str | list[int]]:
    given: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not given:
        raise invalid("prompt", given, "at least one prompt", 'use "" to start from nothing')
    if all(isinstance(one, str) for one in given):
        return [check_text(one) for one in given]
    if not all(getattr(one, "ndim", None) == 1 for one in given):
        raise invalid("prompt", prompt, "texts, or arrays of token ids", "convert it")
    return [[int(token) for token in one] for one in given]


def completion_call(
    body: Mapping[str, Any],
    prompts: Sequence[str | list[int]],
    seed: int,
    end_ids: Mapping[str, int],
    session: SessionInfo | None = None,
) -> TextCall:
    return TextCall(
        "/v1/completions", {**body, "prompt": list(prompts), "seed": seed, "logprobs": 0}, seed, end_ids, session
    )


def _parse_choice(choice: Mapping[str, Any]) -> tuple[str, list[int], list[float]]:
    """Return the text, ids and log-probabilities of a choice, of a completion or a chat, complete or a chunk of a stream."""
    message, logprobs = choice.get("message") or choice.get("delta"), choice["logprobs"] or {}
    text = choice["text"] if "text" in choice else (message or {}).get("content") or ""
    if "content" in logprobs:
        values = [one["logprob"] for one in logprobs["content"]]
    else:
        values = logprobs.get("token_logprobs", [])
    return text, choice["token_ids"], values


def _parse_state(answer: Mapping[str, Any]) -> bytes | None:
    return base64.b64decode(answer["state"]) if answer.get("state") else None


def parse_score(text: str, encoded: Mapping[str, Any], choice: Mapping[str, Any]) -> Score:
    import numpy as np

    found = choice["logprobs"]
    logprobs = [math.nan if one is None else one for one in found["token_logprobs"]]
    unpredicted = _count_first_bytes(text, found) if math.isnan(logprobs[0]) else 0
    return Score(
        text=text,
        tokens=tuple(encoded["pieces"]),
        token_ids=np.array(encoded["tokens"], np.int32),
        logprobs=np.array(logprobs, np.float32),
        n_bytes=len(text.encode()) - unpredicted,
    )


def _count_first_bytes(text: str, logprobs: Mapping[str, Any]) -> int:
    """Return the number of bytes of the first token. Bytes that are no complete character have OpenAI's notation (`bytes:\\xe2`)."""
    first, offsets = logprobs["tokens"][0], logprobs["text_offset"]
    if first.startswith("bytes:\\x"):
        return first.count("\\x")
    return len((text[: offsets[1]] if len(offsets) > 1 else text).encode())
