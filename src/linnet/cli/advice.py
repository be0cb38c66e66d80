"""Suggested next commands, printed at the end of a command."""

from __future__ import annotations

from typing import Any


def needed_prompt(model: Any) -> str:
    """Return the `--prompt` flag for `linnet sample RUN` if the model needs one: without a BOS id the prompt must not be empty."""
    return ' --prompt "The answer"' if getattr(model, "bos_id", 0) is None else ""
