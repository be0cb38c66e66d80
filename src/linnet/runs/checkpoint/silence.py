"""Keeps Orbax's own words off the terminal."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _NotOrbax(logging.Filter):
    """What Orbax logs is for its authors; what a user must know is raised or logged by Linnet."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return "orbax" not in Path(record.pathname).parts and not _from_orbax(error)


@functools.cache
def silence_orbax() -> None:
    """Keeps Orbax's own words off the terminal, once for the process. Other libraries are heard as before.

    When one array of many fails, Orbax raises that error and abandons the other arrays: closes the event loop under
    them, and leaves their tasks to the garbage collector. Their complaints come later, through these three ways.
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
    """Whether an error was raised in Orbax or by TensorStore, whose errors have no frames but always name the store."""
    if error is None:
        return False
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    named = any(words in str(error) for words in ("tensorstore", "OCDBT database", "local file"))
    return named or any("orbax" in Path(file).parts for file in files)
