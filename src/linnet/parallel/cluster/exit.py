"""Immediate exit of a process whose peer is lost: print one clear message and exit, even if the main thread is blocked.

When the coordinator is gone, JAX logs its internals and calls C's abort() without giving Python control. The message is therefore
also printed from a C-level SIGABRT handler; a Python signal handler would wait for the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

EXIT_PEER_LOST = 76
"""Exit code of a process that stopped because a peer was lost. Restarting all processes fixes it."""

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_exiting = threading.Lock()
_handlers: list[object] = []  # keeps the handlers alive: C holds no Python reference to them


def exit_now(message: str, code: int = EXIT_PEER_LOST, delay: float = 0.0) -> NoReturn:
    """Print `message` and exit the process after `delay` seconds, from any thread. A second caller blocks until then."""
    _exiting.acquire()
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, but the process must still exit
        print(message, file=sys.stderr, flush=True)
    time.sleep(delay)
    os._exit(code)


def on_abort(explain: Callable[[], str | None]) -> None:
    """On SIGABRT, print the message that `explain` returns and exit. If it returns None, the abort is unrelated to the cluster and
    proceeds."""

    def aborted(number: int) -> None:
        message = explain()
        if message is not None:
            exit_now(message)

    handler = _HANDLER(aborted)
    _handlers.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, _HANDLER]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
