"""HTTP/1.1 client of the front over a replica's Unix socket. Each call has its own connection, so that closing it cancels the call."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import h11

from linnet.serve.http.limits import MAX_HEADER_BYTES

READ_BYTES = 1 << 16
GET_SECONDS = 5.0
"""Timeout of the front's own requests, none of which runs the model. Below Prometheus' usual scrape timeout of 10 s."""
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
DROPPED_REQUEST_HEADERS = HOP_BY_HOP | {b"content-length", b"authorization", b"host", b"x-request-id"}
"""Request headers that are not forwarded: the front sets the length and the request id, and has checked the API key and the host."""
DROPPED_RESPONSE_HEADERS = HOP_BY_HOP | {b"date", b"x-request-id"}
"""Response headers that are not forwarded, because the front sets its own."""

HeaderList = Sequence[tuple[bytes, bytes]]


class ReplicaLost(Exception):
    """The replica cannot be reached, or closed the connection before its response was complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProxyCall:
    """A complete call to a replica, including its body, because it may have to be sent to a second one."""

    id: str
    method: str
    target: bytes
    """The path with its query string."""
    headers: HeaderList = ()
    body: bytes = b""

    @property
    def wire_headers(self) -> list[tuple[bytes, bytes]]:
        length = [(b"content-length", str(len(self.body)).encode())] if self.body else []
        own = [(b"host", b"localhost"), (b"x-request-id", self.id.encode()), (b"connection", b"close"), *length]
        return [*_without(self.headers, DROPPED_REQUEST_HEADERS), *own]


class ReplicaResponse:
    def __init__(self, response: h11.Response, chunks: AsyncGenerator[bytes, None]) -> None:
        self.status = response.status_code
        self.headers = _without(response.headers, DROPPED_RESPONSE_HEADERS)
        self.chunks = chunks
        """Chunks of the body as they arrive; raises `ReplicaLost` if they end early."""

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")

    @property
    def is_stream(self) -> bool:
        return self.header(b"content-type").startswith(b"text/event-stream")

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks])


@contextlib.asynccontextmanager
async def proxy_request(call: ProxyCall, socket: Path) -> AsyncIterator[ReplicaResponse]:
    """Send a call and yield the response. The connection is closed at the end of the block, which cancels an unfinished response."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError as error:
        raise ReplicaLost(str(error)) from None
    try:
        wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * MAX_HEADER_BYTES)
        writer.write(_serialize(wire, call))
        # The response, such as an error, may arrive before the body has been sent completely.
        async with _sending(writer):
            response = await _response(wire, reader)
            chunks = _chunks(wire, reader)
            async with contextlib.aclosing(chunks):
                yield ReplicaResponse(response, chunks)
    finally:
        writer.transport.abort()


async def get_json(socket: Path, target: bytes) -> Any:
    """Send a GET request of the front's own and parse the response."""
    async with _get(socket, target) as response:
        return json.loads(await response.read())


async def get_text(socket: Path, target: bytes) -> str:
    async with _get(socket, target) as response:
        return (await response.read()).decode()


async def is_ready(socket: Path) -> bool:
    return await _status(socket, b"/ready") == 200


async def is_alive(socket: Path) -> bool:
    """Whether the replica responds, with any status: one that is too busy for more calls is alive."""
    return await _status(socket, b"/health") is not None


async def _status(socket: Path, target: bytes) -> int | None:
    """Return the status of a GET request; None if there is no response."""
    try:
        async with _get(socket, target) as response:
            return response.status
    except ReplicaLost:
        return None


@contextlib.asynccontextmanager
async def _get(socket: Path, target: bytes) -> AsyncIterator[ReplicaResponse]:
    """Send a GET request of the front's own. A timeout raises `ReplicaLost`, too: a hung process keeps its connections open."""
    try:
        async with (
            asyncio.timeout(GET_SECONDS),
            proxy_request(ProxyCall(id="front", method="GET", target=target), socket) as response,
        ):
            yield response
    except TimeoutError:
        raise ReplicaLost(f"no response within {GET_SECONDS:g} s") from None


def _serialize(wire: h11.Connection, call: ProxyCall) -> bytes:
    events = [
        h11.Request(method=call.method, target=call.target, headers=call.wire_headers),
        *([h11.Data(data=call.body)] if call.body else []),
        h11.EndOfMessage(),
    ]
    return b"".join(wire.send(event) or b"" for event in events)


@contextlib.asynccontextmanager
async def _sending(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    task = asyncio.create_task(writer.drain())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _response(wire: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
    while not isinstance(event := await _next(wire, reader), h11.Response):
        if isinstance(event, h11.ConnectionClosed):
            raise ReplicaLost("it closed the connection without a response")
    return event


async def _chunks(wire: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while not isinstance(event := await _next(wire, reader), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        yield bytes(event.data)


async def _next(wire: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    try:
        while (event := wire.next_event()) is h11.NEED_DATA:
            wire.receive_data(await reader.read(READ_BYTES))
    except (h11.RemoteProtocolError, OSError) as error:
        raise ReplicaLost(str(error)) from None
    assert not isinstance(event, type)
    return event


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in names]
