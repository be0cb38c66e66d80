"""How a process of a cluster ends when another is gone: one clear sentence, then at once, whatever the main thread is stuck in.

JAX ends a process whose coordinator is gone by C's abort(), after a page about its own insides, and asks Python nothing. So the
sentence is also said from abort's own signal, with a handler that C calls: Python's own would wait for the main thread.
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
"""The exit code of a process that stopped because another one was gone: starting all of them again mends it."""

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_speaking = threading.Lock()
_kept: list[object] = []  # C holds no reference to the handler it calls


def exit_now(words: str, code: int = EXIT_PEER_LOST, after: float = 0.0) -> NoReturn:
    """Says it and ends this process from any thread. Whoever comes second waits for the end of the first."""
    _speaking.acquire()
    with contextlib.suppress(OSError, ValueError):  # whoever read our words may be gone, but we still have to leave
        print(words, file=sys.stderr, flush=True)
    time.sleep(after)
    os._exit(code)


def on_abort(words: Callable[[], str | None]) -> None:
    """When C++ aborts, says `words` and leaves; where it returns None, the abort has nothing to do with the others and goes on."""

    def aborted(number: int) -> None:
        found = words()
        if found is not None:
            exit_now(found)

    handler = _HANDLER(aborted)
    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, _HANDLER]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
