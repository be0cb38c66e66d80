"""Atomic replacement of files: a reader finds the old content or the new, also after the process was killed while writing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from linnet.core.errors import UserError


def remove_parts(path: Path) -> None:
    """Removes what processes left that were killed while they replaced this file. Nobody may be replacing it now."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)


def atomic_write(path: Path, content: Any, *, sync: bool = False) -> None:
    """Replaces a file, making its folder where needed. `content` is bytes or a buffer. With `sync` it also survives a power cut."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: Exception) -> UserError:
    """For a disk that is full or read-only, or a folder without permission."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UserError(f"{path} cannot be written ({why}). Fix: choose a folder with room that is yours.")
