"""Files that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import UserError


def write_whole(path: Path, content: Any) -> None:
    """`content` is bytes, or an array's memory."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(
            f"{path} cannot be written ({error.strerror}). Fix: choose a folder with room that is yours."
        ) from None


def write_array(path: Path, values: np.ndarray) -> None:
    """As .npy."""
    file = io.BytesIO()
    np.save(file, values)
    write_whole(path, file.getbuffer())
