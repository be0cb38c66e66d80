"""Client connections: a timeout for the request headers, and API error objects for malformed requests."""

from __future__ import annotations

import asyncio
import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from linnet.serve.http.errors import ApiError

HEADER_SECONDS = 10.0
"""Timeout for the headers, from the opening of the connection or the first byte of a later request."""


class Connection(H11Protocol):
    """uvicorn itself has no timeout for headers: a few clients that send a byte now and then could use up its file descriptors."""

    header_seconds = HEADER_SECONDS
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_out(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            message = f"the headers did not arrive within {self.header_seconds:g} s. Fix: send them without delay."
            self._send_error(ApiError(408, message, code="slow_headers"))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles the error, so `sys.exception` has it."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._send_error(ApiError(431, "the headers are too large. Fix: send fewer or shorter headers."))
        else:
            reason = f" ({error})" if isinstance(error, h11.RemoteProtocolError) else ""
            self._send_error(ApiError(400, f"invalid HTTP request{reason}. Fix: send an HTTP/1.1 request."))

    def _send_error(self, problem: ApiError) -> None:
        """Send an error without going through the app, and close the connection. In the middle of a response, only close it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json.dumps(problem.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
        for event in (
            h11.Response(status_code=problem.status, headers=headers, reason=reason[problem.status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
