"""Ctrl-C and SIGTERM: the first asks the run to save and stop, the second ends the process at once.

Python runs its signal handlers only between bytecodes, and a compilation or a long step in C++ may hold them up for long. So a
thread reads the signals from a pipe that C writes to at once, and acts whatever the main thread is doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_INTERRUPTED = 75
"""The exit code of a run that was asked to stop and did, with its state saved: run the same command again to go on."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`requested` turns true at the first signal. Until `may_save` is called there is nothing to save, and it ends at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._saves = self._all_saved = False

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def may_save(self) -> None:
        self._saves = True

    def all_saved(self) -> None:
        """From here on no weights can be lost, and what remains (the last evaluation) is repeated by a resume: end at once."""
        self._all_saved = True

    def signalled(self, number: int) -> None:
        if self._event.is_set():
            _leave("Stopped at once: the second signal does not wait.", 128 + number)
        self._event.set()
        if self._all_saved:
            _leave(
                "Stopped before the end of the last evaluation: the weights are saved. Run the same command again to finish.",
                EXIT_INTERRUPTED,
            )
        if not self._saves:
            _leave("Stopped before the first update: there was nothing new to save.", EXIT_INTERRUPTED)
        print("Stopping: finishing this update and saving. A second signal stops at once.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def watch() -> Iterator[Interrupt]:
    """Catches the signals while a run lasts. Only the main thread can; elsewhere nothing is caught."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while byte := os.read(reader, 1):
            if byte[0] in SIGNALS:
                interrupt.signalled(byte[0])

    def ignore(number: int, frame: FrameType | None) -> None:
        """The thread acts; but a Python handler must be there for C to write to the pipe."""

    old_handlers = {number: signal.signal(number, ignore) for number in SIGNALS}
    old_pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield interrupt
    finally:
        signal.set_wakeup_fd(old_pipe)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def _leave(words: str, code: int) -> None:
    print(words, file=sys.stderr, flush=True)
    os._exit(code)
