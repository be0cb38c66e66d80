"""`linnet.Client`: a server's models from Python, with the methods and results of `Run`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from linnet.api import client_http
from linnet.api.client_calls import Calls
from linnet.api.client_http import Gather, HttpRequest, HttpResponse, Operation, Wait
from linnet.api.client_httpx import api_errors, http_settings, request_fields
from linnet.api.client_text import Message, SessionInfo, TextCall, TextStream
from linnet.api.images import EmbeddingSamples, Images
from linnet.api.results import GeneratedText, Score
from linnet.api.session import write_state

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

    from linnet.api.client_text import ChatOptions, ClientOptions, Ids, Prompt, Prompts, TurnOptions
    from linnet.serve.http.responses import ModelCard, PriorCard

TIMEOUT, RETRIES = 600.0, 3
MAX_THREADS = 8
"""Concurrent calls of one method, such as `generate` with a long list of prompts."""
T = TypeVar("T")


class Client:
    """A client of a Linnet server. Its methods and results are those of `Run`, so that code works with either.

    The same prompt, settings and seed give the same text as `Run.generate`. A client can be used from several threads, and as a
    context manager.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
    ) -> None:
        """Create a client. No request is sent yet.

        Args:
            url: Address of the server.
            api_key: API key, if the server requires one.
            model: Model of all calls that name none. Default: the server's first that supports the call.
            timeout: Seconds to wait for a response, or for the next event of a stream.
            retries: How often a request is repeated if the server is overloaded (429) or unavailable (503), after the time that it
                suggests, at most 30 s.
        """
        import httpx

        self.url = client_http.check_url(url)
        self._calls, self._timeout = Calls(model, retries), timeout
        self._http = httpx.Client(**http_settings(self.url, api_key, timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # The server

    def models(self) -> list[ModelCard | PriorCard]:
        """Return the models with their properties, as `/v1/models` describes them."""
        return self._run(self._calls.models())

    def health(self) -> str:
        """Return the server's status: `ready`, `starting` or `draining`.

        Raises:
            ServerConnectionError: If no server answers.
        """
        return self._run(self._calls.health())

    # Tokens

    def encode(self, text: str, *, model: str | None = None) -> Ids:
        """Return the token ids of a text, without BOS and EOS ids."""
        return self._run(self._calls.encode(text, model))

    def decode(self, ids: Sequence[int] | Ids, *, model: str | None = None) -> str:
        """Return the text of token ids."""
        return self._run(self._calls.decode(ids, model))

    # Text

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[False] = False, **options: Unpack[ClientOptions]
    ) -> GeneratedText: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Unpack[ClientOptions]
    ) -> list[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[True], **options: Unpack[ClientOptions]
    ) -> Iterator[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[True], **options: Unpack[ClientOptions]
    ) -> Iterator[list[GeneratedText | None]]: ...

    def generate(self, prompt: Prompt | Prompts = "", *, stream: bool = False, **options: Unpack[ClientOptions]) -> Any:
        """Generate text that continues a prompt. Defaults are those of `Run.generate`, not those of the HTTP API.

        Args:
            prompt: A text, or an array of token ids. Prompts of a list are generated concurrently.
            stream: Return an iterator over pieces of text. For a list of prompts it yields a list with one piece per prompt, None for
                prompts without a new piece. The last piece has the finish reason and no text.
            **options: `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`, `stop`, `ignore_eos` and
                `add_special_tokens` as in `Run.generate`; `model`; the other fields of the HTTP API, such as `regex` and
                `response_format`. `return_state=True` sets `state` of the result, and `state=` continues from it.

        Returns:
            The text, without the prompt; a list of texts for a list of prompts.
        """
        if not stream:
            return self._run(self._calls.generate(prompt, **options))
        rows = self._stream(self._calls.stream(prompt, **options))
        return rows if isinstance(prompt, list | tuple) else _singles(rows)

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> GeneratedText: ...

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[GeneratedText]: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> GeneratedText | Iterator[GeneratedText]:
        """Answer a conversation with the model's chat template.

        Args:
            messages: Messages such as `{"role": "user", "content": "Who sings?"}`. A text is one message of the user.
            stream: Return an iterator over pieces of text.
            **options: As in `generate`.
        """
        return self._answer(self._calls.chat(messages, options), stream)

    @overload
    def score(self, text: str, *, model: str | None = None) -> Score: ...

    @overload
    def score(self, text: list[str], *, model: str | None = None) -> list[Score]: ...

    def score(self, text: str | list[str], *, model: str | None = None) -> Score | list[Score]:
        """Compute the log-probability of each token of a text, and its bits per byte, as `Run.score` does."""
        return self._run(self._calls.score(text, model))

    def session(
        self,
        source: str | os.PathLike[str] | bytes | None = None,
        *,
        id: str | None = None,
        model: str | None = None,
    ) -> RemoteSession:
        """Start a conversation on the server, restore one from a file, or open an existing one.

        Args:
            source: A file that `Session.save` or the server wrote, or its bytes. Default: an empty conversation.
            id: An existing session of the server.
            model: The model of a new session.
        """
        if id is not None:
            return RemoteSession(self, self._run(self._calls.open_session(id)))
        return RemoteSession(self, self._run(self._calls.create_session(source, model)))

    # Images and embeddings

    def generate_images(
        self,
        n: int = 1,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        model: str | None = None,
    ) -> Images:
        """Generate images with a model of pixels. The arguments are those of `Run.generate_images`."""
        settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        return self._run(self._calls.generate_images(n, seed, model, **settings))

    def sample(
        self,
        texts: str | Sequence[str] = (),
        *,
        embeddings: Float32[np.ndarray, "*B X"] | None = None,
        text_encodings: Float32[np.ndarray, "*B L X"] | None = None,
        n: int = 1,
        steps: int | None = None,
        solver: Literal["dpm", "ddim", "ddpm"] = "dpm",
        guidance: float = 1.0,
        seed: int = 0,
        nearest: int = 8,
        model: str | None = None,
    ) -> EmbeddingSamples:
        """Sample image embeddings of texts with a prior. The arguments are those of `Run.sample`; `row` of a nearest image is that of
        the server's gallery."""
        settings = {"steps": steps, "solver": solver, "guidance": guidance, "seed": seed, "nearest": nearest}
        return self._run(self._calls.sample(texts, embeddings, text_encodings, n, model, **settings))

    # Input and output

    def _run(self, operation: Operation[T]) -> T:
        try:
            effect = next(operation)
            while True:
                effect = operation.send(self._perform(effect))
        except StopIteration as end:
            return end.value

    def _perform(self, effect: client_http.Effect) -> Any:
        match effect:
            case Wait(seconds):
                time.sleep(seconds)
            case Gather([only]):
                return [self._run(only)]
            case Gather(operations):
                with ThreadPoolExecutor(MAX_THREADS) as threads:
                    return list(threads.map(self._run, operations))
            case HttpRequest():
                return self._send(effect)

    def _send(self, request: HttpRequest) -> HttpResponse:
        with api_errors(self.url, self._timeout):
            response = self._http.send(self._http.build_request(**request_fields(request)), stream=True)
            if request.is_stream and response.status_code < 300:
                return HttpResponse(status=response.status_code, headers=response.headers, stream=response)
            try:
                body = response.read()
            finally:
                response.close()
        return HttpResponse(status=response.status_code, headers=response.headers, body=body)

    def _answer(self, call: Operation[TextCall], stream: bool) -> GeneratedText | Iterator[GeneratedText]:
        if stream:
            return _singles(self._stream(self._calls.open_stream(call)))
        return self._run(self._calls.complete(call))

    def _stream(self, operation: Operation[TextStream]) -> Iterator[list[GeneratedText | None]]:
        parser = self._run(operation)
        opened = self._run(self._calls.send(parser.request))
        try:
            with api_errors(self.url, self._timeout):
                for data in opened.stream.iter_bytes():
                    yield from parser.feed(data)
        finally:
            opened.stream.close()
        if not parser.is_done:
            raise client_http.broken_off(self.url, "the stream has no end")


class RemoteSession:
    """A conversation on a server. `Client.session` makes one; as a context manager, it deletes the session at the end."""

    def __init__(self, client: Client, info: SessionInfo) -> None:
        self._client, self._info = client, info

    @property
    def id(self) -> str:
        """The id of the session on the server."""
        return self._info.id

    @property
    def model(self) -> str:
        return self._info.model

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation so far, as far as this client knows."""
        return self._info.n_tokens

    @property
    def state_bytes(self) -> int:
        """Size of the state in its slot, which is constant for a `vq` model."""
        return self._info.state_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return str(self._info)

    def close(self) -> None:
        """Delete the session on the server."""
        self._client._run(self._client._calls.delete_session(self._info))

    def append(self, text: str) -> Self:
        """Add a text to the conversation without an answer. It is sent with the next `generate`."""
        self._info.append(text)
        return self

    @overload
    def generate(
        self, prompt: str = "", *, stream: Literal[False] = False, **options: Unpack[TurnOptions]
    ) -> GeneratedText: ...

    @overload
    def generate(
        self, prompt: str = "", *, stream: Literal[True], **options: Unpack[TurnOptions]
    ) -> Iterator[GeneratedText]: ...

    def generate(
        self, prompt: str = "", *, stream: bool = False, **options: Unpack[TurnOptions]
    ) -> GeneratedText | Iterator[GeneratedText]:
        """Read a prompt and generate an answer, which becomes part of the conversation. Options are those of `Client.generate`. With
        `stream`, the session advances when the iterator ends; if it is closed earlier, the session stays as it was."""
        return self._client._answer(self._client._calls.turn(self._info, prompt, options), stream)

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[TurnOptions]
    ) -> GeneratedText: ...

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[TurnOptions]
    ) -> Iterator[GeneratedText]: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[TurnOptions]
    ) -> GeneratedText | Iterator[GeneratedText]:
        """Answer new messages of the conversation. Earlier ones are not sent again."""
        return self._client._answer(self._client._calls.chat_turn(self._info, messages, options), stream)

    def fork(self) -> RemoteSession:
        """Return an independent session that continues from the same state."""
        return RemoteSession(self._client, self._client._run(self._client._calls.fork(self._info)))

    def to_bytes(self) -> bytes:
        """Return the state as the bytes of a session file."""
        return self._client._run(self._client._calls.session_state(self._info))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state to a file, which `Client.session` and `Run.session` restore, and return its path."""
        return write_state(path, self.to_bytes())


def _singles(rows: Iterator[list[GeneratedText | None]]) -> Iterator[GeneratedText]:
    """Return the pieces of a single prompt."""
    return (row[0] for row in rows if row[0] is not None)
