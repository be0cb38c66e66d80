"""Reverse proxy in front of the replicas: authentication, limits and load balancing. Requests and responses are passed unchanged."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from linnet.serve.http.app import ENDPOINTS, no_route
from linnet.serve.http.auth import AllowedHosts, ApiKeys
from linnet.serve.http.errors import NO_RETRY, ApiError, ClientGone, draining
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Calls, Limits, read_bytes
from linnet.serve.http.metrics import CONTENT_TYPE, Metrics
from linnet.serve.http.middleware import RequestMiddleware
from linnet.serve.http.openapi import Endpoint
from linnet.serve.http.sse import cancel_on_disconnect, event
from linnet.serve.replicas import metrics as replica_metrics
from linnet.serve.replicas.fleet import Fleet, Replica
from linnet.serve.replicas.upstream import ProxyCall, ReplicaLost, ReplicaResponse, get_text, proxy_request

RETRY_CODES = frozenset({"queue_full", "draining"})
"""Error codes for which another replica is tried."""
MAX_LOST = 2
"""Maximum replicas that may die during one call before it fails, because the call itself may be the cause."""


def make_front(
    fleet: Fleet, *, keys: Sequence[str], limits: Limits, lifecycle: Lifecycle, host: str, state_bytes: int
) -> Starlette:
    """Build the front's app. `state_bytes`: size of the largest state that a body may contain."""
    counts = Metrics(())
    middleware = Middleware(
        RequestMiddleware,
        keys=ApiKeys(keys),
        allowed_hosts=AllowedHosts(None if keys else host),
        calls=Calls(limits.calls_per_key),
        lifecycle=lifecycle,
        metrics=counts,
    )

    async def health(http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(http: HttpRequest) -> Response:
        if lifecycle.is_draining or not fleet.ready:
            return JSONResponse({"status": "draining" if lifecycle.is_draining else "starting"}, 503)
        return JSONResponse({"status": "ready"})

    async def metrics(http: HttpRequest) -> Response:
        ready = fleet.ready
        scraped = await asyncio.gather(*(get_text(one.socket, b"/metrics") for one in ready), return_exceptions=True)
        texts = {one.number: text for one, text in zip(ready, scraped, strict=True) if isinstance(text, str)}
        text = replica_metrics.merge_metrics(counts.text().decode(), texts, fleet)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    own = {"/health": health, "/ready": ready, "/metrics": metrics}
    routes = [
        Route(
            one.path,
            own.get(one.path) or ProxyRoute(fleet, one, limits, lifecycle, state_bytes),
            methods=[one.method],
        )
        for one in ENDPOINTS
    ]
    return Starlette(routes=routes, middleware=[middleware], exception_handlers={HTTPException: no_route})


class ProxyRoute:
    """Handler of one proxied route. The body is read completely before it is forwarded, so that a second replica can be tried."""

    def __init__(
        self, fleet: Fleet, endpoint: Endpoint, limits: Limits, lifecycle: Lifecycle, state_bytes: int
    ) -> None:
        self._fleet, self._lifecycle = fleet, lifecycle
        self._generates = endpoint.streams
        """Whether the route generates; other routes are also served while draining."""
        in_base64 = 4 * min(state_bytes, limits.state_bytes) // 3
        self._max_bytes = limits.state_bytes if endpoint.takes == "file" else limits.body_bytes + in_base64
        self._seconds = limits.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._generates and self._lifecycle.is_draining:
            raise draining()
        body = await read_bytes(HttpRequest(scope, receive), self._max_bytes, self._seconds)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        call = ProxyCall(
            id=scope["state"]["request_id"],
            method=scope["method"],
            target=scope["raw_path"] + query,
            headers=scope["headers"],
            body=body,
        )
        response = ClientResponse(send)
        cancellation = _Cancellation()
        self._lifecycle.responses.add(cancellation)
        try:
            await cancel_on_disconnect(receive, cancellation.run(self._forward(call, response)))
        except ApiError as problem:
            await response.fail(problem)
        except ClientGone:
            if not response.is_complete:  # a disconnect after the complete response is normal
                raise

    async def _forward(self, call: ProxyCall, response: ClientResponse) -> None:
        tried: list[Replica] = []
        rejections: list[tuple[ReplicaResponse, bytes]] = []
        n_lost = 0
        while n_lost < MAX_LOST and (replica := self._fleet.choose(tried)) is not None:
            tried.append(replica)
            try:
                with replica.busy():
                    async with proxy_request(call, replica.socket) as answer:
                        if answer.is_stream:
                            return await response.stream(answer)
                        body = await answer.read()
                        if not _is_retryable(answer.status, body):
                            return await response.send(answer, body)
                        rejections.append((answer, body))
            except ReplicaLost:
                if response.has_begun:
                    raise _interrupted() from None
                n_lost += 1
                await replica.wait_exit()
        if not rejections:
            raise draining() if self._lifecycle.is_draining else _no_replica(n_lost)
        soonest = min(rejections, key=lambda one: _retry_after(one[0]))
        await response.send(*soonest)


class ClientResponse:
    """The response to the client. Until its first bytes are sent (a complete body, or the start of a stream), another replica may
    still be tried."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = self.is_complete = False

    async def stream(self, answer: ReplicaResponse) -> None:
        async for chunk in answer.chunks:
            await self._begin(answer)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self.send(answer, b"")

    async def send(self, answer: ReplicaResponse, body: bytes) -> None:
        await self._begin(answer)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.is_complete = True

    async def fail(self, problem: ApiError) -> None:
        """Report an error: as the last event of a stream that has started, otherwise by raising it."""
        if not self.has_begun:
            raise problem
        await self._send({"type": "http.response.body", "body": event(problem.body()), "more_body": False})

    async def _begin(self, answer: ReplicaResponse) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})


class _Cancellation:
    """Lets the end of a drain cancel a call with an error response."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            raise ApiError(503, "the server cancelled the request. Fix: try again.", code="cancelled") from None


def _is_retryable(status: int, body: bytes) -> bool:
    return status in (429, 503) and json.loads(body)["error"]["code"] in RETRY_CODES


def _retry_after(answer: ReplicaResponse) -> float:
    seconds = answer.header(b"retry-after")
    return int(seconds) if seconds.isdigit() else math.inf


def _interrupted() -> ApiError:
    message = (
        "the replica died while answering. Fix: send the request again; with the same seed the answer is the same. A session is "
        "unchanged, unless its n_tokens has grown: then only the end of this answer is missing."
    )
    return ApiError(503, message, code="replica_lost", headers=NO_RETRY)


def _no_replica(n_lost: int) -> ApiError:
    if n_lost:
        message = f"{n_lost} replicas died before answering. Fix: see the server's log, and try again later."
        return ApiError(503, message, code="replica_lost", headers=NO_RETRY)
    message = "no replica is ready. Fix: try again in a few seconds."
    return ApiError(503, message, code="no_replica", headers={"retry-after": "5"})
