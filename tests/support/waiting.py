"""Waiting for events in tests. A loaded machine may take long for anything, so only a hang fails, never a slow step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds after which something that should have happened counts as never happening."""


def until(condition: Callable[[], object], describe: Callable[[], object] = lambda: "") -> None:
    """Returns once the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {PATIENCE:g} s: {describe()}"
        time.sleep(0.005)


async def eventually(condition: Callable[[], object]) -> None:
    """As `until`, for a test that runs in an event loop."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {PATIENCE:g} s"
        await asyncio.sleep(0.005)
