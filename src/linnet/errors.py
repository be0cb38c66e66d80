"""The errors a user can cause, and the one sentence each must carry: the field, what it got, what it needs, the fix."""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """Something the user asked for that cannot be done. The command prints it without a traceback and exits 2."""


def refuse(field: str, got: Any, needs: str, fix: str) -> UserError:
    """`raise refuse("data.update_len", 1000, "a multiple of model.block_len (128)", "use 1024")`."""
    return UserError(f"{field} is {got!r}, but it must be {needs}. Fix: {fix}.")
