"""The errors a user can cause, and the one sentence each must carry: the field, what it got, what it needs, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_CHARACTERS = 2000
"""Of a message. The sentences of ours are shorter; what they quote from a file may be of any length."""


class UserError(ValueError):
    """Something the user asked for that cannot be done. The command prints it without a traceback and exits 2.

    The message may quote names and values from an untrusted file, so control characters are escaped and its length is bounded."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shortened(_printable(message)))


def invalid(field: str, got: Any, needs: str, fix: str) -> UserError:
    """`raise refuse("data.update_len", 1000, "a multiple of model.block_len (128)", "use 1024")`."""
    return UserError(f"{field} is {got!r}, but it must be {needs}. Fix: {fix}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to put into a message, or nothing where no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def _printable(message: str) -> str:
    """One line. What a terminal would act on or could not show is escaped."""
    if message.isprintable():
        return message
    message = " ".join(message.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def _shortened(message: str) -> str:
    """The end is kept, since it names the fix."""
    if len(message) <= MAX_CHARACTERS:
        return message
    return f"{message[: MAX_CHARACTERS - 400]} ... {message[-390:]}"
