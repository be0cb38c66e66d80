"""Graceful shutdown: after the first signal /ready returns 503 and running calls finish, for at most a given number of seconds."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol, TextIO

import uvicorn
from starlette.types import ASGIApp

from linnet.core.errors import UserError, invalid
from linnet.serve.http.auth import is_loopback
from linnet.serve.http.connection import Connection
from linnet.serve.http.limits import MAX_HEADER_BYTES

KEEP_ALIVE_SECONDS = 15
"""Keep-alive timeout. Longer than common client keep-alives (httpx: 5 s), to avoid races with connections we are closing."""
SHUTDOWN_SECONDS = 2
"""Grace period for connections that are still open after the drain's limit."""


class Closable(Protocol):
    """A response that can be cancelled by the server; its client receives an error."""

    def close(self) -> None: ...


class Lifecycle:
    """State of the server: active calls, open responses, and whether it is draining."""

    def __init__(self) -> None:
        self.n_active = 0
        self.is_draining = False
        self.responses: weakref.WeakSet[Closable] = weakref.WeakSet()
        """Responses that have not been garbage-collected."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.n_active += 1
        try:
            yield
        finally:
            self.n_active -= 1

    def drain(self) -> None:
        self.is_draining = True

    def close_responses(self) -> None:
        """Cancel all responses. Their clients receive an error, where uvicorn would only close the connection."""
        for response in list(self.responses):
            response.close()


class DrainingServer(uvicorn.Server):
    """A server that keeps accepting connections while draining: uvicorn would close its socket at the first signal, and probes could
    not see the drain."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_seconds: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_seconds = drain_seconds
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._lifecycle.is_draining:
            super().handle_exit(sig, frame)  # a second signal exits immediately
        self._lifecycle.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._lifecycle.is_draining:
            self._until = self._until or time.monotonic() + self._drain_seconds
            is_late = time.monotonic() >= self._until
            if is_late:
                self._lifecycle.close_responses()
            if is_late or not self._lifecycle.n_active:
                self.should_exit = True
        return await super().on_tick(counter)


class PortInUse(UserError):
    """Another process listens on the port."""

    exit_code = 4


def check_port(host: str, port: int) -> None:
    """Check that the port is free, before models are loaded, which may take minutes. The port is bound when they are ready."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        needs = f"a port that can be bound on {host} ({error.strerror})"
        unusable = invalid("--port", port, needs, "use another --port, or stop the process that uses this one")
        raise PortInUse(str(unusable)) if error.errno == errno.EADDRINUSE else unusable from None


def run(
    app: ASGIApp, lifecycle: Lifecycle, *, host: str, port: int, has_keys: bool, drain_seconds: float = 30.0
) -> None:
    """Serve until a signal, and return when all calls are drained."""
    check_host(host, has_keys)
    log_json(sys.stderr)
    try:
        _run(server_config(app, host, port), lifecycle, drain_seconds)
    except SystemExit:  # uvicorn raises it if it cannot bind: the port was taken since the check
        check_port(host, port)
        raise


def run_replica(app: ASGIApp, lifecycle: Lifecycle, *, address: Path, drain_seconds: float) -> None:
    """Serve a front until a signal or the front's exit. The front writes the access log."""
    log_json(sys.stderr, ("linnet.failures",))
    threading.Thread(target=_end_with_front, daemon=True).start()
    config = server_config(app, "", 0)
    config.uds = str(address)
    _run(config, lifecycle, drain_seconds)


def _end_with_front() -> None:
    """Terminate when the front exits: it holds the other end of standard input and never writes, so reading blocks until then."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _run(config: uvicorn.Config, lifecycle: Lifecycle, drain_seconds: float) -> None:
    # The objects that exist now are permanent. Scanning them in every full collection would pause the engine and all responses
    # for 0.1 s or more.
    gc.collect()
    gc.freeze()
    DrainingServer(config, lifecycle, drain_seconds).run()


def server_config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        ws="none",
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,  # while they arrive; complete ones are checked in `limits`
        access_log=False,  # replaced by our own, which has more fields
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def log_json(file: TextIO, names: Sequence[str] = ("linnet.access", "linnet.failures")) -> None:
    """Log to `file` without a prefix: the server's log messages are JSON, one object per line."""
    handler = logging.StreamHandler(file)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def check_host(host: str, has_keys: bool) -> None:
    if not has_keys and not is_loopback(host):
        raise invalid("--host", host, "a loopback address unless there are API keys", "use --keys-file, or 127.0.0.1")
