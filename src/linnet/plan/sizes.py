"""Parse and format sizes in bytes."""

from __future__ import annotations

import re

from linnet.core.errors import invalid

_UNITS = {"": 1.0, "b": 1.0} | {f"{p}b": 1000.0**i for i, p in enumerate("kmgt", 1)}
_BINARY = {f"{p}ib": 1024.0**i for i, p in enumerate("kmgt", 1)}


def parse_size(text: str, field: str) -> float:
    """Parse a size such as `16GB`, `16GiB` or `80e9`."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    units = _UNITS | _BINARY
    if not found or found[2].lower() not in units:
        raise invalid(field, text, "a size in bytes", "write it as 16GB or 80GiB")
    try:
        value = float(found[1]) * units[found[2].lower()]
    except ValueError:
        raise invalid(field, text, "a size in bytes", "write it as 16GB or 80GiB") from None
    if not value > 0:
        raise invalid(field, text, "above 0", "write it as 16GB")
    return value


def in_words(n_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.3g} {unit}" if n_bytes < 999.5 * scale else f"{n_bytes / scale:,.0f} {unit}"
    return f"{n_bytes:.0f} B"


def seconds_in_words(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:,.3g} {unit}" if seconds < 999.5 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
