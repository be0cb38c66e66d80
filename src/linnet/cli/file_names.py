"""Names of files that come from what was asked for."""

from __future__ import annotations

import re

MAX_LETTERS = 40


def slugify(words: str, otherwise: str) -> str:
    """Letters, digits and hyphens of a text, not too many; `otherwise` where it has none."""
    return re.sub(r"[^\w]+", "-", words).strip("-")[:MAX_LETTERS].strip("-") or otherwise
