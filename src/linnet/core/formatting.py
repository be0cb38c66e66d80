"""Human-readable durations, and file names made of text."""

from __future__ import annotations

import re

MAX_SLUG = 40


def duration(seconds: float) -> str:
    """Format a duration as `0:07`, `3:25`, `2:03:25` or `4 d 2:03`."""
    total = max(0, round(seconds))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days} d {hours % 24}:{minutes % 60:02d}"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{total % 60:02d}"
    return f"{minutes}:{total % 60:02d}"


def slugify(text: str, default: str) -> str:
    """Return at most `MAX_SLUG` word characters and hyphens of a text, for a file name, or `default` if it has none."""
    return re.sub(r"[^\w]+", "-", text).strip("-")[:MAX_SLUG].strip("-") or default
