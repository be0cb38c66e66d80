"""Files that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from linnet.files import atomic_write

write_whole = atomic_write


def write_array(path: Path, values: np.ndarray) -> None:
    """As .npy."""
    file = io.BytesIO()
    np.save(file, values)
    write_whole(path, file.getbuffer())
