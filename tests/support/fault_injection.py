"""Fault injection: ends a training before its n-th change of the disk, as a kill would."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest


class Killed(BaseException):
    """Not an Exception, so that nothing handles it."""


class Killer:
    """Once armed, counts the main thread's renames and writes to files. Before the n-th one it raises `Killed`; from then on every
    change of the disk does, so that no cleanup changes what a kill would have left."""

    def __init__(self, patch: pytest.MonkeyPatch, n: int) -> None:
        self.left, self.armed, self.dead = n, False, False
        for name in ("replace", "rename", "write"):
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **named: Any) -> Any:
            if self.armed and threading.current_thread() is threading.main_thread() and _is_file(target):
                self.left -= 1
                self.dead = self.dead or self.left <= 0
                if self.dead:
                    raise Killed
            return real(target, *args, **named)

        return call


def _is_file(target: Any) -> bool:
    """Not a pipe or socket, over which threads wake each other."""
    return not isinstance(target, int) or stat.S_ISREG(os.fstat(target).st_mode)
