"""`linnet.AsyncClient`: `Client` for asyncio. Requests, results, errors and retries are shared with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from linnet.api import client_http
from linnet.api.client import RETRIES, TIMEOUT
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

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same methods, arguments and results.

    Await each call. A stream is an asynchronous iterator, which is not awaited:
    `async for piece in client.generate("def ", stream=True)`.
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
        """Create a client. See `Client` for the arguments."""
        import httpx

        self.url = client_http.check_url(url)
        self._calls, self._timeout = Calls(model, retries), timeout
        self._http = httpx.AsyncClient(**http_settings(self.url, api_key, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # The server

    async def models(self) -> list[ModelCard | PriorCard]:
        """See `Client.models`."""
        return await self._run(self._calls.models())

    async def health(self) -> str:
        """See `Client.health`."""
        return await self._run(self._calls.health())

    # Tokens

    async def encode(self, text: str, *, model: str | None = None) -> Ids:
        """See `Client.encode`."""
        return await self._run(self._calls.encode(text, model))

    async def decode(self, ids: Sequence[int] | Ids, *, model: str | None = None) -> str:
        """See `Client.decode`."""
        return await self._run(self._calls.decode(ids, model))

    # Text

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[False] = False, **options: Unpack[ClientOptions]
    ) -> Awaitable[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Unpack[ClientOptions]
    ) -> Awaitable[list[GeneratedText]]: ...

    @overload
    def generate(
        self, prompt: Prompt = "", *, stream: Literal[True], **options: Unpack[ClientOptions]
    ) -> AsyncIterator[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, stream: Literal[True], **options: Unpack[ClientOptions]
    ) -> AsyncIterator[list[GeneratedText | None]]: ...

    def generate(self, prompt: Prompt | Prompts = "", *, stream: bool = False, **options: Unpack[ClientOptions]) -> Any:
        """See `Client.generate`."""
        if not stream:
            return self._run(self._calls.generate(prompt, **options))
        rows = self._stream(self._calls.stream(prompt, **options))
        return rows if isinstance(prompt, list | tuple) else _singles(rows)

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> Awaitable[GeneratedText]: ...

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[GeneratedText]: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Awaitable[GeneratedText] | AsyncIterator[GeneratedText]:
        """See `Client.chat`."""
        return self._answer(self._calls.chat(messages, options), stream)

    @overload
    async def score(self, text: str, *, model: str | None = None) -> Score: ...

    @overload
    async def score(self, text: list[str], *, model: str | None = None) -> list[Score]: ...

    async def score(self, text: str | list[str], *, model: str | None = None) -> Score | list[Score]:
        """See `Client.score`."""
        return await self._run(self._calls.score(text, model))

    async def session(
        self,
        source: str | os.PathLike[str] | bytes | None = None,
        *,
        id: str | None = None,
        model: str | None = None,
    ) -> AsyncRemoteSession:
        """See `Client.session`. Usage: `async with await client.session() as session:`."""
        if id is not None:
            return AsyncRemoteSession(self, await self._run(self._calls.open_session(id)))
        return AsyncRemoteSession(self, await self._run(self._calls.create_session(source, model)))

    # Images and embeddings

    async def generate_images(
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
        """See `Client.generate_images`."""
        settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        return await self._run(self._calls.generate_images(n, seed, model, **settings))

    async def sample(
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
        """See `Client.sample`."""
        settings = {"steps": steps, "solver": solver, "guidance": guidance, "seed": seed, "nearest": nearest}
        return await self._run(self._calls.sample(texts, embeddings, text_encodings, n, model, **settings))

    # Input and output

    async def _run(self, operation: Operation[T]) -> T:
        try:
            effect = next(operation)
            while True:
                effect = operation.send(await self._perform(effect))
        except StopIteration as end:
            return end.value

    async def _perform(self, effect: client_http.Effect) -> Any:
        match effect:
            case Wait(seconds):
                await asyncio.sleep(seconds)
            case Gather(operations):
                return await asyncio.gather(*map(self._run, operations))
            case HttpRequest():
                return await self._send(effect)

    async def _send(self, request: HttpRequest) -> HttpResponse:
        with api_errors(self.url, self._timeout):
            response = await self._http.send(self._http.build_request(**request_fields(request)), stream=True)
            if request.is_stream and response.status_code < 300:
                return HttpResponse(status=response.status_code, headers=response.headers, stream=response)
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        return HttpResponse(status=response.status_code, headers=response.headers, body=body)

    def _answer(
        self, call: Operation[TextCall], stream: bool
    ) -> Awaitable[GeneratedText] | AsyncIterator[GeneratedText]:
        if stream:
            return _singles(self._stream(self._calls.open_stream(call)))
        return self._run(self._calls.complete(call))

    async def _stream(self, operation: Operation[TextStream]) -> AsyncGenerator[list[GeneratedText | None], None]:
        parser = await self._run(operation)
        opened = await self._run(self._calls.send(parser.request))
        try:
            with api_errors(self.url, self._timeout):
                async for data in opened.stream.aiter_bytes():
                    for row in parser.feed(data):
                        yield row
        finally:
            await opened.stream.aclose()
        if not parser.is_done:
            raise client_http.broken_off(self.url, "the stream has no end")


class AsyncRemoteSession:
    """`RemoteSession` for asyncio. `AsyncClient.session` makes one; as a context manager, it deletes the session at the end."""

    def __init__(self, client: AsyncClient, info: SessionInfo) -> None:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._info}"

    async def close(self) -> None:
        """Delete the session on the server."""
        await self._client._run(self._client._calls.delete_session(self._info))

    def append(self, text: str) -> Self:
        """Add a text to the conversation without an answer. It is sent with the next `generate`, so this is not awaited."""
        self._info.append(text)
        return self

    @overload
    def generate(
        self, prompt: str = "", *, stream: Literal[False] = False, **options: Unpack[TurnOptions]
    ) -> Awaitable[GeneratedText]: ...

    @overload
    def generate(
        self, prompt: str = "", *, stream: Literal[True], **options: Unpack[TurnOptions]
    ) -> AsyncIterator[GeneratedText]: ...

    def generate(
        self, prompt: str = "", *, stream: bool = False, **options: Unpack[TurnOptions]
    ) -> Awaitable[GeneratedText] | AsyncIterator[GeneratedText]:
        """See `RemoteSession.generate`."""
        return self._client._answer(self._client._calls.turn(self._info, prompt, options), stream)

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[False] = False, **options: Unpack[TurnOptions]
    ) -> Awaitable[GeneratedText]: ...

    @overload
    def chat(
        self, messages: str | Sequence[Message], *, stream: Literal[True], **options: Unpack[TurnOptions]
    ) -> AsyncIterator[GeneratedText]: ...

    def chat(
        self, messages: str | Sequence[Message], *, stream: bool = False, **options: Unpack[TurnOptions]
    ) -> Awaitable[GeneratedText] | AsyncIterator[GeneratedText]:
        """See `RemoteSession.chat`."""
        return self._client._answer(self._client._calls.chat_turn(self._info, messages, options), stream)

    async def fork(self) -> AsyncRemoteSession:
        """See `RemoteSession.fork`."""
        return AsyncRemoteSession(self._client, await self._client._run(self._client._calls.fork(self._info)))

    async def to_bytes(self) -> bytes:
        """See `RemoteSession.to_bytes`."""
        return await self._client._run(self._client._calls.session_state(self._info))

    async def save(self, path: str | os.PathLike[str]) -> Path:
        """See `RemoteSession.save`."""
        return write_state(path, await self.to_bytes())


async def _singles(rows: AsyncGenerator[list[GeneratedText | None], None]) -> AsyncGenerator[GeneratedText, None]:
    """Yield the pieces of a single prompt."""
    try:
        async for row in rows:
            if row[0] is not None:
                yield row[0]
    finally:
        await rows.aclose()
