"""The calls of `Client` and `AsyncClient`: request bodies, and results of the same types as those of `Run`. See `client_http`."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from linnet.api.client_http import EventDecoder, Gather, HttpRequest, HttpResponse, Operation, send
from linnet.api.images import EmbeddingSamples, Images, Neighbor
from linnet.api.results import FinishReason, GeneratedText, Score
from linnet.api.text import MAX_SEED, MAX_TOKENS, TOP_P, TokenOptions, check_seeds
from linnet.core.errors import UserError, did_you_mean, invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32, Int32, UInt8

    from linnet.serve.http.responses import ModelCard, PriorCard

    Ids = Int32[np.ndarray, " n"]
    Prompt = str | Ids
    Prompts = list[str] | list[Ids]

MAX_ANSWERS = 32
"""Answers of one call to the server. Longer lists are sent as several concurrent calls."""
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
    def streamed(self) -> HttpRequest:
        body = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        return HttpRequest(method="POST", path=self.path, json=body, is_stream=True)

    def texts(self, answer: Mapping[str, Any]) -> list[GeneratedText]:
        """Parse a complete answer."""
        self.advance(answer["usage"])
        state = _state(answer)
        return [self._text(choice, answer["model"], state) for choice in answer["choices"]]

    def advance(self, usage: Mapping[str, Any]) -> None:
        if self.session is not None:
            self.session.n_tokens += usage["total_tokens"]
            self.session.pending = ""

    def _text(self, choice: Mapping[str, Any], model: str, state: bytes | None) -> GeneratedText:
        text, ids, logprobs = _parts(choice)
        reason = self.reason(choice["finish_reason"], ids, model)
        return GeneratedText(text, token_ids=ids, logprobs=logprobs, finish_reason=reason, seed=self.seed, state=state)

    def reason(self, given: str, ids: Sequence[int], model: str) -> FinishReason:
        """The server's `stop` is also that of EOS, which a `Run` reports as `end`."""
        if given == "length":
            return "length"
        is_end = not self.body.get("ignore_eos") and ids and ids[-1] == self.end_ids.get(model)
        return "end" if is_end else "stop"


class TextStream:
    """Parses the events of a stream of text. `T` of a stream of several prompts is a list with one piece per prompt."""

    def __init__(self, call: TextCall, n: int) -> None:
        self._call, self._events = call, EventDecoder()
        self._last: list[Sequence[int]] = [()] * n
        self._reasons: dict[int, str] = {}
        self._model, self._state = "", None

    @property
    def request(self) -> HttpRequest:
        return self._call.streamed

    @property
    def is_done(self) -> bool:
        return self._events.is_done

    def feed(self, data: bytes) -> Iterator[list[GeneratedText | None]]:
        for event in self._events.feed(data):
            self._model = event["model"]
            self._state = _state(event) or self._state
            if event.get("usage") is not None:
                self._call.advance(event["usage"])
            for choice in event["choices"]:
                yield from self._pieces(choice)
        if self.is_done:
            yield [self._ending(i) for i in range(len(self._last))]

    def _pieces(self, choice: Mapping[str, Any]) -> Iterator[list[GeneratedText | None]]:
        i = choice["index"]
        text, ids, logprobs = _parts(choice)
        self._last[i] = ids or self._last[i]
        if choice["finish_reason"] is not None:
            self._reasons[i] = choice["finish_reason"]
        if text or ids:
            row: list[GeneratedText | None] = [None] * len(self._last)
            row[i] = GeneratedText(text, token_ids=ids, logprobs=logprobs, seed=self._call.seed)
            yield row

    def _ending(self, i: int) -> GeneratedText:
        reason = self._call.reason(self._reasons[i], self._last[i], self._model)
        return GeneratedText("", finish_reason=reason, seed=self._call.seed, state=self._state)


class Calls:
    """Builds the operations of a client, and remembers the server's models."""

    def __init__(self, model: str | None, retries: int) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise invalid("retries", retries, "0 or more", "use 3")
        self._model, self.retries = model, retries
        self._cards: dict[str, Any] | None = None

    def send(self, request: HttpRequest) -> Operation[HttpResponse]:
        return send(request, self.retries)

    # The server

    def models(self) -> Operation[list[ModelCard | PriorCard]]:
        response = yield from self.send(HttpRequest(method="GET", path="/v1/models"))
        found = response.json()["data"]
        self._cards = {card["id"]: card for card in found}
        return found

    def health(self) -> Operation[str]:
        response = yield from send(HttpRequest(method="GET", path="/ready", accepts=(503,)), 0)
        return response.json()["status"]

    def _end_ids(self) -> Operation[Mapping[str, int]]:
        """Return the EOS id of each model. They are requested once."""
        if self._cards is None:
            yield from self.models()
        assert self._cards is not None
        return {name: card["end_id"] for name, card in self._cards.items() if "end_id" in card}

    # Tokens

    def encode(self, text: str, model: str | None) -> Operation[Ids]:
        import numpy as np

        return np.array((yield from self._tokenize(text, model))["tokens"], np.int32)

    def decode(self, ids: Sequence[int] | Ids, model: str | None) -> Operation[str]:
        body = {"tokens": [int(token) for token in ids], **self._named(model)}
        response = yield from self.send(HttpRequest(method="POST", path="/v1/detokenize", json=body))
        return response.json()["text"]

    def _tokenize(self, text: str, model: str | None) -> Operation[dict[str, Any]]:
        body = {"text": check_text(text), **self._named(model)}
        return (yield from self.send(HttpRequest(method="POST", path="/v1/tokenize", json=body))).json()

    # Text

    def generate(self, prompt: Prompt | Prompts, seed: int | Sequence[int] = 0, **options: Any) -> Operation[Any]:
        """Generate a text per prompt. Prompts with the same seed share a call."""
        several = isinstance(prompt, list | tuple)
        prompts = check_prompts(prompt)
        seeds, body = check_seeds(seed, len(prompts)), self._text_body(options, ClientOptions)
        end_ids = yield from self._end_ids()
        batches: list[list[int]] = []
        for one in dict.fromkeys(seeds):
            rows = [i for i, other in enumerate(seeds) if other == one]
            batches += [rows[start : start + MAX_ANSWERS] for start in range(0, len(rows), MAX_ANSWERS)]
        calls = [_completion(body, [prompts[i] for i in rows], seeds[rows[0]], end_ids) for rows in batches]
        found = yield Gather([self._texts(call) for call in calls])
        texts = {i: text for rows, made in zip(batches, found, strict=True) for i, text in zip(rows, made, strict=True)}
        return [texts[i] for i in range(len(prompts))] if several else texts[0]

    def stream(self, prompt: Prompt | Prompts, seed: int | Sequence[int] = 0, **options: Any) -> Operation[TextStream]:
        prompts = check_prompts(prompt)
        seeds, body = check_seeds(seed, len(prompts)), self._text_body(options, ClientOptions)
        if len(set(seeds)) > 1:
            raise invalid("seed", list(seeds), "one number in a stream", "use one seed, or several streams")
        end_ids = yield from self._end_ids()
        return TextStream(_completion(body, prompts, seeds[0], end_ids), len(prompts))

    def chat(self, messages: str | Sequence[Message], **options: Any) -> Operation[GeneratedText]:
        call = yield from self._chat_call(messages, options)
        return (yield from self._texts(call))[0]

    def chat_stream(self, messages: str | Sequence[Message], **options: Any) -> Operation[TextStream]:
        return TextStream((yield from self._chat_call(messages, options)), 1)

    def _chat_call(
        self,
        messages: str | Sequence[Message],
        options: Mapping[str, Any],
        session: SessionInfo | None = None,
    ) -> Operation[TextCall]:
        options = dict(options)
        (seed,) = check_seeds(options.pop("seed", 0), 1)
        body = self._text_body(options, TurnOptions if session else ChatOptions)
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body |= {"messages": said, "seed": seed, "logprobs": True}
        return TextCall("/v1/chat/completions", body, seed, (yield from self._end_ids()), session)

    def _texts(self, call: TextCall) -> Operation[list[GeneratedText]]:
        return call.texts((yield from self.send(call.request)).json())

    def score(self, text: str | list[str], model: str | None) -> Operation[Any]:
        texts = list(text) if isinstance(text, list | tuple) else [text]
        encoded = yield Gather([self._tokenize(one, model) for one in texts])
        for one, tokens in zip(texts, encoded, strict=True):
            if not tokens["count"]:
                raise invalid("text", one, "at least one token", "leave it out")
        starts = range(0, len(texts), MAX_ANSWERS)
        batches = [[one["tokens"] for one in encoded[start : start + MAX_ANSWERS]] for start in starts]
        found = yield Gather([self._echoes(ids, model) for ids in batches])
        choices = [choice for batch in found for choice in batch]
        scores = [_score(*one) for one in zip(texts, encoded, choices, strict=True)]
        return scores if isinstance(text, list | tuple) else scores[0]

    def _echoes(self, prompts: list[list[int]], model: str | None) -> Operation[list[Any]]:
        body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0, **self._named(model)}
        return (yield from self.send(HttpRequest(method="POST", path="/v1/completions", json=body))).json()["choices"]

    def _text_body(self, options: Mapping[str, Any], known: type[Any]) -> dict[str, Any]:
        """Return the fields of a request, with the defaults of `Run.generate`."""
        names = typed_dict_keys(known)
        for name in options:
            if name not in names:
                raise TypeError(f"unexpected keyword argument {name!r}.{did_you_mean(name, names)}")
        body = {"max_tokens": MAX_TOKENS, "top_p": TOP_P, **options, "return_token_ids": True}
        body |= self._named(body.get("model"))
        for name in ("stop", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            if name in body and not isinstance(body[name], str):
                body[name] = list(body[name])
        if body.get("stop") == []:
            del body["stop"]
        if body.get("state") is not None:
            body["state"] = base64.b64encode(body["state"]).decode()
        return body

    # Sessions

    def create_session(
        self, source: str | os.PathLike[str] | bytes | None, model: str | None
    ) -> Operation[SessionInfo]:
        if source is None:
            return (yield from self._session("POST", "", json=self._named(model)))
        if not isinstance(source, bytes):
            try:
                source = Path(source).read_bytes()
            except OSError as error:
                needs = f"a session file that can be read ({error.strerror})"
                raise invalid("source", str(source), needs, "check the path") from None
        return (yield from self._session("POST", "/restore", content=source, query=self._named(model)))

    def open_session(self, id: str) -> Operation[SessionInfo]:
        return (yield from self._session("GET", f"/{quote(id, safe='')}"))

    def fork(self, session: SessionInfo) -> Operation[SessionInfo]:
        session.check()
        info = yield from self._session("POST", f"/{session.id}/fork")
        info.pending = session.pending
        return info

    def session_state(self, session: SessionInfo) -> Operation[bytes]:
        session.check()
        if session.pending:
            raise UserError("the appended text was not read yet. Fix: generate before saving the session.")
        response = yield from self.send(HttpRequest(method="GET", path=f"/v1/sessions/{session.id}/state"))
        return response.body

    def delete_session(self, session: SessionInfo) -> Operation[None]:
        if session.is_open:
            session.is_open = False
            path = f"/v1/sessions/{session.id}"
            yield from self.send(HttpRequest(method="DELETE", path=path, accepts=(404,)))

    def turn(self, session: SessionInfo, prompt: str, options: Mapping[str, Any]) -> Operation[TextCall]:
        session.check()
        options = dict(options)
        (seed,) = check_seeds(options.pop("seed", 0), 1)
        body = {**self._text_body(options, TurnOptions), "session": session.id, "model": session.model}
        text = session.pending + check_text(prompt)
        return _completion(body, [text], seed, (yield from self._end_ids()), session)

    def turn_text(self, session: SessionInfo, prompt: str, **options: Any) -> Operation[GeneratedText]:
        call = yield from self.turn(session, prompt, options)
        return (yield from self._texts(call))[0]

    def turn_stream(self, session: SessionInfo, prompt: str, **options: Any) -> Operation[TextStream]:
        return TextStream((yield from self.turn(session, prompt, options)), 1)

    def chat_turn(
        self, session: SessionInfo, messages: str | Sequence[Message], options: Mapping[str, Any]
    ) -> Operation[TextCall]:
        session.check()
        if session.pending:
            raise UserError("the session has appended text. Fix: generate before the next chat message.")
        call = yield from self._chat_call(messages, options, session)
        return dataclasses.replace(call, body={**call.body, "session": session.id, "model": session.model})

    def chat_turn_text(
        self, session: SessionInfo, messages: str | Sequence[Message], **options: Any
    ) -> Operation[GeneratedText]:
        call = yield from self.chat_turn(session, messages, options)
        return (yield from self._texts(call))[0]

    def chat_turn_stream(
        self, session: SessionInfo, messages: str | Sequence[Message], **options: Any
    ) -> Operation[TextStream]:
        return TextStream((yield from self.chat_turn(session, messages, options)), 1)

    def _session(self, method: str, path: str, **more: Any) -> Operation[SessionInfo]:
        response = yield from self.send(HttpRequest(method=method, path=f"/v1/sessions{path}", **more))
        card = response.json()
        return SessionInfo(card["id"], card["model"], card["n_tokens"], card["state_bytes"])

    # Images and embeddings

    def generate_images(self, n: int, seed: int, model: str | None, **settings: float) -> Operation[Images]:
        if n < 1:
            raise invalid("n", n, "at least 1", "use 1")
        check_seeds(seed, 1)
        import numpy as np

        seeds = [(seed + i) % (MAX_SEED + 1) for i in range(n)]
        batches = [seeds[start : start + MAX_ANSWERS] for start in range(0, n, MAX_ANSWERS)]
        bodies = [{"n": len(one), "seed": one[0], **settings, **self._named(model)} for one in batches]
        found = yield Gather([self._json("/v1/images/generations", body) for body in bodies])
        pixels = [_pixels(one["b64_json"]) for answer in found for one in answer["data"]]
        return Images(pixels=np.stack(pixels), seeds=tuple(seeds))

    def sample(
        self,
        texts: str | Sequence[str],
        embeddings: Float32[np.ndarray, "*B X"] | None,
        text_encodings: Float32[np.ndarray, "*B L X"] | None,
        n: int,
        model: str | None,
        **settings: Any,
    ) -> Operation[EmbeddingSamples]:
        """Sample embeddings. Texts that exceed the answers of one call are sent in several."""
        import numpy as np

        names = (texts,) if isinstance(texts, str) else tuple(texts)
        if (embeddings is None) == (not names):
            raise invalid("texts and embeddings", "none or both", "one of the two", "give texts or embeddings")
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_ANSWERS:
            raise invalid("n", n, f"1 to {MAX_ANSWERS}", "use 1")
        check_seeds(settings["seed"], 1)
        if not (yield from self._has_gallery(model)):
            settings["nearest"] = 0
        fields: dict[str, list[Any]] = {}
        if embeddings is None:
            fields["input"] = list(names)
        else:
            fields["embeddings"] = np.atleast_2d(embeddings).tolist()
            names = tuple(f"embedding {i}" for i in range(len(fields["embeddings"])))
        if text_encodings is not None:
            given = np.asarray(text_encodings)
            fields["text_encodings"] = (given[None] if given.ndim == 2 else given).tolist()
        same = {name: value for name, value in settings.items() if value is not None} | self._named(model)
        size = MAX_ANSWERS // n
        bodies = [
            {**same, "n": n, **{name: value[start : start + size] for name, value in fields.items()}}
            for start in range(0, len(names), size)
        ]
        found = yield Gather([self._json("/v1/priors/sample", body) for body in bodies])
        return _samples(names, found)

    def _has_gallery(self, model: str | None) -> Operation[bool]:
        """Whether the prior has images to search. An unknown model is left to the server to report."""
        if self._cards is None:
            yield from self.models()
        name = self._model if model is None else model
        priors = [card for card in (self._cards or {}).values() if "gallery" in card]
        chosen = [card for card in priors if card["id"] == name] if name else priors[:1]
        return all(card["gallery"] > 0 for card in chosen)

    def _json(self, path: str, body: Mapping[str, Any]) -> Operation[Any]:
        return (yield from self.send(HttpRequest(method="POST", path=path, json=body))).json()

    def _named(self, model: str | None) -> dict[str, str]:
        name = self._model if model is None else model
        return {} if name is None else {"model": name}


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


def _completion(
    body: Mapping[str, Any],
    prompts: Sequence[str | list[int]],
    seed: int,
    end_ids: Mapping[str, int],
    session: SessionInfo | None = None,
) -> TextCall:
    return TextCall(
        "/v1/completions", {**body, "prompt": list(prompts), "seed": seed, "logprobs": 0}, seed, end_ids, session
    )


def _parts(choice: Mapping[str, Any]) -> tuple[str, list[int], list[float]]:
    """Return the text, ids and log-probabilities of a choice, of a completion or a chat, complete or a chunk of a stream."""
    said, logprobs = choice.get("message") or choice.get("delta"), choice["logprobs"] or {}
    text = choice["text"] if "text" in choice else (said or {}).get("content") or ""
    if "content" in logprobs:
        values = [one["logprob"] for one in logprobs["content"]]
    else:
        values = logprobs.get("token_logprobs", [])
    return text, choice["token_ids"], values


def _state(answer: Mapping[str, Any]) -> bytes | None:
    return base64.b64decode(answer["state"]) if answer.get("state") else None


def _score(text: str, encoded: Mapping[str, Any], choice: Mapping[str, Any]) -> Score:
    import numpy as np

    found = choice["logprobs"]
    logprobs = [math.nan if one is None else one for one in found["token_logprobs"]]
    unpredicted = _first_bytes(text, found) if math.isnan(logprobs[0]) else 0
    return Score(
        text=text,
        tokens=tuple(encoded["pieces"]),
        token_ids=np.array(encoded["tokens"], np.int32),
        logprobs=np.array(logprobs, np.float32),
        n_bytes=len(text.encode()) - unpredicted,
    )


def _first_bytes(text: str, logprobs: Mapping[str, Any]) -> int:
    """Return the bytes of the first token. Bytes that are no complete character have OpenAI's notation (`bytes:\\xe2`)."""
    first, offsets = logprobs["tokens"][0], logprobs["text_offset"]
    if first.startswith("bytes:\\x"):
        return first.count("\\x")
    return len((text[: offsets[1]] if len(offsets) > 1 else text).encode())


def _pixels(data: str) -> UInt8[np.ndarray, "h w 3"]:
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


def _samples(names: tuple[str, ...], answers: Sequence[Mapping[str, Any]]) -> EmbeddingSamples:
    import numpy as np

    rows = [row for answer in answers for row in answer["data"]]
    cosines = [[one["cosine"] for one in row["candidates"]] for row in rows]
    near = [row["nearest"] or [] for row in rows]
    has_images = all(near) and all(one["b64_json"] is not None for row in near for one in row)
    has_neighbors = all(near)
    return EmbeddingSamples(
        texts=names,
        embeddings=np.array([row["embedding"] for row in rows], np.float32),
        seeds=tuple(row["seed"] for row in rows),
        cosines=None if cosines[0][0] is None else np.array(cosines, np.float32),
        nearest=tuple(tuple(Neighbor(one["cosine"], one["caption"], one["row"]) for one in row) for row in near)
        if has_neighbors
        else (),
        pictures=np.stack([np.stack([_pixels(one["b64_json"]) for one in row]) for row in near])
        if has_images
        else None,
        steps=answers[0]["steps"],
        note=None if has_neighbors else "the server returned no nearest images",
    )
