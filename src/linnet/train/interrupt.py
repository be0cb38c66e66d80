"""Handling of Ctrl-C and SIGTERM: the first signal makes the run save and stop, the second ends the process at once.

Python runs signal handlers only between bytecodes, so a compilation or a long step in C++ can delay them. A thread therefore reads
the signals from a wakeup pipe, which the C handler writes immediately, and acts whatever the main thread is doing.
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
"""Exit code of a run that was interrupted and saved its state. Run the same command again to resume it."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Stop request of a run: `requested` becomes true at the first signal.

    Before `may_save` is called there is nothing to save, so the first signal ends the process.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._may_save = self._may_exit = False

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def may_save(self) -> None:
        self._may_save = True

    def allow_exit(self) -> None:
        """Make the first signal end the process: all weights are saved, and a resume repeats the remaining evaluation."""
        self._may_exit = True

    def handle_embedded(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in a program that calls the trainer, such as a notebook: never end its process."""
        if self._event.is_set() or self._may_exit or not self._may_save:
            raise KeyboardInterrupt
        self.handle(number)

    def handle(self, number: int) -> None:
        if self._event.is_set():
            _exit("Stopped at once: the second signal does not wait.", 128 + number)
        self._event.set()
        if self._may_exit:
            _exit(
                "Stopped before the end of the last evaluation: the weights are saved. Run the same command again to finish.",
                EXIT_INTERRUPTED,
            )
        if not self._may_save:
            _exit("Stopped before the first update: there was nothing new to save.", EXIT_INTERRUPTED)
        print("Stopping: finishing this update and saving. A second signal stops at once.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def handle_signals(*, may_exit: bool = True) -> Iterator[Interrupt]:
    """Handle the signals while the context is open. Has no effect outside the main thread, where Python allows no handlers.

    Without `may_exit` only Ctrl-C is handled, and raises KeyboardInterrupt where it would end the process."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    if not may_exit:
        old = signal.signal(signal.SIGINT, interrupt.handle_embedded)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, old)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while byte := os.read(reader, 1):
            if byte[0] in SIGNALS:
                interrupt.handle(byte[0])

    def ignore(number: int, frame: FrameType | None) -> None:
        """Do nothing: the thread acts. Python writes to the wakeup pipe only for signals that have a Python handler."""

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


def _exit(message: str, code: int) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
