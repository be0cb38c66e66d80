"""Advice printed at the end of a command, as it must be typed to work."""

from __future__ import annotations

from typing import Any


def needed_prompt(model: Any) -> str:
    """For `linnet sample RUN`: a model without a begin id cannot begin with an empty prompt."""
    return ' --prompt "The answer"' if getattr(model, "bos_id", 0) is None else ""
