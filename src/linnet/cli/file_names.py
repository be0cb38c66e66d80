"""File names derived from user text."""

from __future__ import annotations

import re

MAX_LETTERS = 40


def slugify(words: str, otherwise: str) -> str:
    """Return at most `MAX_LETTERS` word characters and hyphens of a text, or `otherwise` if it has none."""
    return re.sub(r"[^\w]+", "-", words).strip("-")[:MAX_LETTERS].strip("-") or otherwise
