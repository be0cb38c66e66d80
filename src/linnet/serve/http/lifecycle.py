"""From ready to drained: the first signal turns /ready to 503 and lets what runs come to its end; then, or at the limit, it exits."""

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

KEEP_SECONDS = 15
"""An idle connection stays open. Longer than clients keep theirs (httpx 5 s), or they would now and then ask into a closing door."""
LAST_SECONDS = 2
"""For connections that are still open when the drain's limit has passed."""


class Closing(Protocol):
    """What may be ended from outside: its own end then tells so."""

    def close(self) -> None: ...


class Lifecycle:
    """What the server is doing, as the probes see it."""

    def __init__(self) -> None:
        self.n_active = 0
        self.is_draining = False
        self.answers: weakref.WeakSet[Closing] = weakref.WeakSet()
        """Those that nobody dropped yet."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        self.n_active += 1
        try:
            yield
        finally:
            self.n_active -= 1

    def drain(self) -> None:
        self.is_draining = True

    def close_answers(self) -> None:
        """Their clients are told, where uvicorn would only cut the line."""
        for answers in list(self.answers):
            answers.close()


class DrainingServer(uvicorn.Server):
    """uvicorn alone would close its door at the first signal: no probe could see that it drains."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_seconds: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_seconds = drain_seconds
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._lifecycle.is_draining:
            super().handle_exit(sig, frame)  # the second signal: at once
        self._lifecycle.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._lifecycle.is_draining:
            self._until = self._until or time.monotonic() + self._drain_seconds
            is_late = time.monotonic() >= self._until
            if is_late:
                self._lifecycle.close_answers()
            if is_late or not self._lifecycle.n_active:
                self.should_exit = True
        return await super().on_tick(counter)


class PortInUse(UserError):
    """Another process listens there."""

    exit_code = 4


def check_port(host: str, port: int) -> None:
    """Called before a model is loaded, which may take minutes; the port itself is taken when the models are ready."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        needs = f"one that {host} lets us listen on ({error.strerror})"
        refused = invalid("--port", port, needs, "use another --port, or stop the process that listens there")
        raise PortInUse(str(refused)) if error.errno == errno.EADDRINUSE else refused from None


def run(
    app: ASGIApp, lifecycle: Lifecycle, *, host: str, port: int, has_keys: bool, drain_seconds: float = 30.0
) -> None:
    """Serves until a signal. Returns when all is drained."""
    check_host(host, has_keys)
    log_lines(sys.stderr)
    try:
        _run(server_config(app, host, port), lifecycle, drain_seconds)
    except SystemExit:  # uvicorn's way to report that it cannot listen: the port was taken since it was checked
        check_port(host, port)
        raise


def run_replica(app: ASGIApp, lifecycle: Lifecycle, *, address: Path, drain_seconds: float) -> None:
    """Serves a front until a signal, or until its end. The front logs the calls."""
    log_lines(sys.stderr, ("linnet.failures",))
    threading.Thread(target=_end_with_front, daemon=True).start()
    config = server_config(app, "", 0)
    config.uds = str(address)
    _run(config, lifecycle, drain_seconds)


def _end_with_front() -> None:
    """The front holds the other end of standard input, and never writes: to read is to wait for its end."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _run(config: uvicorn.Config, lifecycle: Lifecycle, drain_seconds: float) -> None:
    # What is there now stays. To look through all of it again in every full collection would stop the engine and everyone's
    # answers for a tenth of a second and more.
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
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,  # while they arrive; those that came are looked at in `limits`
        access_log=False,  # ours tells more
        server_header=False,
        timeout_keep_alive=KEEP_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
    )


def log_lines(file: TextIO, names: Sequence[str] = ("linnet.access", "linnet.failures")) -> None:
    """The server's logs are JSON already: one object a line, nothing around it."""
    handler = logging.StreamHandler(file)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def check_host(host: str, has_keys: bool) -> None:
    if not has_keys and not is_loopback(host):
        raise invalid("--host", host, "a loopback address while there is no API key", "give a key, or use 127.0.0.1")
