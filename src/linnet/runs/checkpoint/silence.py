"""Suppression of Orbax's log messages."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _NotOrbax(logging.Filter):
    """Drops log records from Orbax. Linnet itself raises or logs whatever the user needs to know."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return "orbax" not in Path(record.pathname).parts and not _from_orbax(error)


@functools.cache
def silence_orbax() -> None:
    """Keep Orbax's messages off the terminal, for the rest of the process. Other libraries are not affected.

    When one array of many fails, Orbax raises that error and abandons the other arrays: it closes their event loop and leaves
    their tasks to the garbage collector. Their errors then appear later through these three channels.
    """
    logging.getLogger("absl").addFilter(_NotOrbax())
    logging.getLogger("asyncio").addFilter(_NotOrbax())
    sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _report_unraisable(otherwise: Callable[[Any], None], unraisable: Any) -> None:
    error = unraisable.exc_value
    abandoned = unraisable.object is None and str(error) == "Event loop is closed"
    if not abandoned and not _from_orbax(error):
        otherwise(unraisable)


def _from_orbax(error: BaseException | None) -> bool:
    """Whether an error was raised by Orbax, or by TensorStore, whose errors have no frames but always name the store."""
    if error is None:
        return False
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    is_named = any(text in str(error) for text in ("tensorstore", "OCDBT database", "local file"))
    return is_named or any("orbax" in Path(file).parts for file in files)
