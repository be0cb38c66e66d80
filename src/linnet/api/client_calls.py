"""The calls of `Client` and `AsyncClient`, as operations of `client_http`. Results have the types of those of `Run`."""

from __future__ import annotations

import base64
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from linnet.api.client_http import Gather, HttpRequest, HttpResponse, Operation, send
from linnet.api.client_images import MAX_ANSWERS, parse_pixels, parse_samples, sample_bodies
from linnet.api.client_text import (
    ChatOptions,
    ClientOptions,
    Message,
    SessionInfo,
    TextCall,
    TextStream,
    TurnOptions,
    check_prompts,
    check_text,
    completion_call,
    parse_score,
    typed_dict_keys,
)
from linnet.api.images import EmbeddingSamples, Images
from linnet.api.results import GeneratedText
from linnet.api.session import read_state
from linnet.api.text import MAX_SEED, MAX_TOKENS, TOP_P, check_seeds
from linnet.core.errors import UserError, did_you_mean, invalid

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

    from linnet.api.client_text import Ids, Prompt, Prompts
    from linnet.serve.http.responses import ModelCard, PriorCard


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
        return (yield from self._post("/v1/detokenize", body))["text"]

    def _tokenize(self, text: str, model: str | None) -> Operation[dict[str, Any]]:
        return (yield from self._post("/v1/tokenize", {"text": check_text(text), **self._named(model)}))

    # Text. A call is an operation too, because the finish reason depends on the models' EOS ids.

    def complete(self, call: Operation[TextCall]) -> Operation[GeneratedText]:
        """Return the text of a call with one prompt or conversation."""
        return (yield from self._texts((yield from call)))[0]

    def open_stream(self, call: Operation[TextCall]) -> Operation[TextStream]:
        """Return the parser of a call's stream, for one prompt or conversation."""
        return TextStream((yield from call), 1)

    def generate(self, prompt: Prompt | Prompts, seed: int | Sequence[int] = 0, **options: Any) -> Operation[Any]:
        """Generate a text per prompt. Prompts with the same seed share a call."""
        is_list = isinstance(prompt, list | tuple)
        prompts = check_prompts(prompt)
        seeds, body = check_seeds(seed, len(prompts)), self._text_body(options, ClientOptions)
        end_ids = yield from self._end_ids()
        batches: list[list[int]] = []
        for one in dict.fromkeys(seeds):
            rows = [i for i, other in enumerate(seeds) if other == one]
            batches += [rows[start : start + MAX_ANSWERS] for start in range(0, len(rows), MAX_ANSWERS)]
        calls = [completion_call(body, [prompts[i] for i in rows], seeds[rows[0]], end_ids) for rows in batches]
        found = yield Gather([self._texts(call) for call in calls])
        texts = {i: text for rows, made in zip(batches, found, strict=True) for i, text in zip(rows, made, strict=True)}
        return [texts[i] for i in range(len(prompts))] if is_list else texts[0]

    def stream(self, prompt: Prompt | Prompts, seed: int | Sequence[int] = 0, **options: Any) -> Operation[TextStream]:
        prompts = check_prompts(prompt)
        seeds, body = check_seeds(seed, len(prompts)), self._text_body(options, ClientOptions)
        if len(set(seeds)) > 1:
            raise invalid("seed", list(seeds), "one number in a stream", "use one seed, or several streams")
        end_ids = yield from self._end_ids()
        return TextStream(completion_call(body, prompts, seeds[0], end_ids), len(prompts))

    def chat(
        self,
        messages: str | Sequence[Message],
        options: Mapping[str, Any],
        session: SessionInfo | None = None,
    ) -> Operation[TextCall]:
        options = dict(options)
        (seed,) = check_seeds(options.pop("seed", 0), 1)
        body = self._text_body(options, TurnOptions if session else ChatOptions)
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body |= {"messages": given, "seed": seed, "logprobs": True}
        return TextCall("/v1/chat/completions", body, seed, (yield from self._end_ids()), session)

    def score(self, text: str | list[str], model: str | None) -> Operation[Any]:
        texts = list(text) if isinstance(text, list | tuple) else [text]
        encoded = yield Gather([self._tokenize(one, model) for one in texts])
        for one, tokens in zip(texts, encoded, strict=True):
            if not tokens["count"]:
                raise invalid("text", one, "at least one token", "leave it out")
        starts = range(0, len(texts), MAX_ANSWERS)
        batches = [[one["tokens"] for one in encoded[start : start + MAX_ANSWERS]] for start in starts]
        echo = {"max_tokens": 0, "echo": True, "logprobs": 0, **self._named(model)}
        answers = yield Gather([self._post("/v1/completions", {"prompt": ids, **echo}) for ids in batches])
        choices = [choice for answer in answers for choice in answer["choices"]]
        scores = [parse_score(*one) for one in zip(texts, encoded, choices, strict=True)]
        return scores if isinstance(text, list | tuple) else scores[0]

    def _texts(self, call: TextCall) -> Operation[list[GeneratedText]]:
        return call.parse((yield from self.send(call.request)).json())

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
        content = read_state(source)
        return (yield from self._session("POST", "/restore", content=content, query=self._named(model)))

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
        """Continue a session with a prompt, after the appended text."""
        session.check()
        options = dict(options)
        (seed,) = check_seeds(options.pop("seed", 0), 1)
        body = {**self._text_body(options, TurnOptions), "session": session.id, "model": session.model}
        text = session.pending + check_text(prompt)
        return completion_call(body, [text], seed, (yield from self._end_ids()), session)

    def chat_turn(
        self, session: SessionInfo, messages: str | Sequence[Message], options: Mapping[str, Any]
    ) -> Operation[TextCall]:
        """Continue a session with messages."""
        session.check()
        if session.pending:
            raise UserError("the session has appended text. Fix: generate before the next chat message.")
        call = yield from self.chat(messages, options, session)
        return dataclasses.replace(call, body={**call.body, "session": session.id, "model": session.model})

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
        answers = yield Gather([self._post("/v1/images/generations", body) for body in bodies])
        pixels = [parse_pixels(one["b64_json"]) for answer in answers for one in answer["data"]]
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
        names, bodies = sample_bodies(texts, embeddings, text_encodings, n, self._named(model))
        check_seeds(settings["seed"], 1)
        if not (yield from self._has_gallery(model)):
            settings["nearest"] = 0
        given = {name: value for name, value in settings.items() if value is not None}
        answers = yield Gather([self._post("/v1/priors/sample", given | body) for body in bodies])
        return parse_samples(names, answers)

    def _has_gallery(self, model: str | None) -> Operation[bool]:
        """Whether the prior has images to search. An unknown model is left to the server to report."""
        if self._cards is None:
            yield from self.models()
        name = self._model if model is None else model
        priors = [card for card in (self._cards or {}).values() if "gallery" in card]
        chosen = [card for card in priors if card["id"] == name] if name else priors[:1]
        return all(card["gallery"] > 0 for card in chosen)

    def _post(self, path: str, body: Mapping[str, Any]) -> Operation[Any]:
        return (yield from self.send(HttpRequest(method="POST", path=path, json=body))).json()

    def _named(self, model: str | None) -> dict[str, str]:
        name = self._model if model is None else model
        return {} if name is None else {"model": name}
