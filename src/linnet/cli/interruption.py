"""Ctrl-C during startup: imports take seconds, and an interrupt during them must exit without a traceback.

This module has no expensive imports, so that the handler is installed first."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPT = 130
"""128 + SIGINT, as shells report it."""


def install() -> None:
    """Replace Python's default SIGINT handler. Any other handler is kept: a background job continues to ignore the signal."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once inside an import: module code may swallow the exception or turn it into another error,
    and there is nothing to clean up."""
    if is_importing(frame):
        exit_now()
    signal.default_int_handler(number, frame)


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def exit_now() -> NoReturn:
    os._exit(EXIT_INTERRUPT)
