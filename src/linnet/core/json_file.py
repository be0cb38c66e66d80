"""Reading JSON that may be damaged or hostile: every failure is a ValueError or OSError, and the size is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20
"""Settings and indices are far smaller; the largest tokenizer.json files take about 30 MB."""


def parse_json(content: bytes | str) -> Any:
    """`json.loads`, with one kind of exception: ValueError, whatever is wrong with the text."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises OSError if it cannot be read and ValueError if it is not JSON."""
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MB")
    return parse_json(content)
