"""Middleware: request id, authentication, concurrency limit, access log, and a 500 for unexpected exceptions."""

from __future__ import annotations

import json
import logging
import time
import uuid
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linnet.serve.http.auth import OPEN_PATHS, AllowedHosts, ApiKeys
from linnet.serve.http.errors import ClientGone, to_api_error
from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Calls, check_headers
from linnet.serve.http.metrics import Metrics

ACCESS = logging.getLogger("linnet.access")
CLIENT_GONE = 499
UNCOUNTED = OPEN_PATHS | {"/metrics"}
"""Paths exempt from the concurrency limit. They also do not delay a drain."""


class RequestMiddleware:
    """Pure ASGI (not BaseHTTPMiddleware), so that disconnects and long streams work."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        allowed_hosts: AllowedHosts,
        calls: Calls,
        lifecycle: Lifecycle,
        metrics: Metrics,
        is_replica: bool = False,
    ) -> None:
        """A replica takes the request ids from its front, so that a second attempt of a call can be recognized."""
        self._app, self._keys, self._hosts, self._is_replica = app, keys, allowed_hosts, is_replica
        self._calls, self._lifecycle, self._metrics = calls, lifecycle, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        front_id = Headers(scope=scope).get("x-request-id") if self._is_replica else None
        call = _Call(scope, send, front_id or f"req_{uuid.uuid4().hex}")
        try:
            with ExitStack() as stack:
                headers = Headers(scope=scope)
                check_headers(headers)
                self._hosts.check(headers.get("host"))
                call.owner = self._keys.owner(scope["path"], headers.get("authorization"))
                if scope["path"] not in UNCOUNTED:
                    stack.enter_context(self._calls.running(call.owner))
                    stack.enter_context(self._lifecycle.active())
                await self._app(scope, receive, call.send)
        except ClientGone:
            call.status = CLIENT_GONE
        except Exception as error:
            await self._fail(call, scope, receive, error)
        finally:
            self._metrics.count_response(call.route, call.status or CLIENT_GONE)
            call.log()

    async def _fail(self, call: _Call, scope: Scope, receive: Receive, error: Exception) -> None:
        problem = to_api_error(error, call.id)
        if call.status is None:
            await problem.response()(scope, receive, call.send)


class _Call:
    """One call, with the fields of its access log line."""

    def __init__(self, scope: Scope, send: Send, id: str) -> None:
        self.id = id
        self.owner = "nobody"
        self.status: int | None = None
        self._scope, self._send = scope, send
        self._start, self._n_bytes = time.monotonic(), 0
        scope.setdefault("state", {})["request_id"] = self.id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.id
        else:
            self._n_bytes += len(message.get("body", b""))
        await self._send(message)

    @property
    def route(self) -> str:
        """The route's pattern rather than the path, so that clients cannot create new metric labels."""
        return getattr(self._scope.get("route"), "path", "other")

    def log(self) -> None:
        if not ACCESS.isEnabledFor(logging.INFO):
            return
        line = {
            "time": round(time.time(), 3),
            "request_id": self.id,
            "method": self._scope["method"],
            "path": self._scope["path"][:200],
            "status": self.status,
            "seconds": round(time.monotonic() - self._start, 4),
            "bytes": self._n_bytes,
            "key": self.owner,
        }
        ACCESS.info(json.dumps(line))
