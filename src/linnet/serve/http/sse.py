"""Server-sent events in OpenAI's format, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from linnet.serve.http.errors import ClientGone, to_api_error

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    body = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    return b"data: " + body + b"\n\n" if name is None else f"event: {name}\ndata: ".encode() + body + b"\n\n"


async def with_error_event(events: AsyncGenerator[bytes, None], request_id: str) -> AsyncGenerator[bytes, None]:
    """Send an error as the last event, because the status has already been sent."""
    try:
        async with aclosing(events):
            async for one in events:
                yield one
    except Exception as error:
        yield event(to_api_error(error, request_id).body())


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects first, cancel it and raise ClientGone. The body must have been read."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends what the generator yields. `close` is called exactly once, however the stream ends, even if it never started."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the socket is closed
            raise ClientGone from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
