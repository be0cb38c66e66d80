"""Files: atomic replacement, JSON that may be damaged or hostile, and the cache folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from linnet.core.errors import UserError


def remove_parts(path: Path) -> None:
    """Remove the temporary files of processes killed while writing this file. No process may be writing it now."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that atomically replaces `path` when the block ends, and is removed if the block fails.

    Creates the folder if needed. With `sync` the content is also fsynced, so that it survives a power failure."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


def atomic_write(path: Path, content: Any, *, sync: bool = False) -> None:
    """Replace a file by `content`, which is bytes or a buffer. See `atomic_file`."""
    with atomic_file(path, sync=sync) as file:
        file.write(content)


def unwritable(path: Path, error: Exception) -> UserError:
    """Return the error for a full or read-only disk, or a folder without write permission."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UserError(f"{path} cannot be written ({why}). Fix: choose a folder with room that is yours.")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linnet"


MAX_JSON_BYTES = 256 << 20
"""Settings and indices are far smaller; the largest tokenizer.json files take about 30 MB."""


def parse_json(content: bytes | str) -> Any:
    """`json.loads`, but every parse failure is a ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises OSError if it cannot be read and ValueError if it is not JSON."""
    with open(path, "rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MB")
    return parse_json(content)
