"""The package's exceptions. Each message names the field, the value it got, what is required and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_CHARACTERS = 2000
"""Maximum length of a message. Linnet's own text is shorter, but text quoted from a file can have any length."""


class LinnetError(Exception):
    """Base class of the exceptions that the public API raises."""


class UserError(LinnetError, ValueError):
    """An invalid request by the user. The command line prints it without a traceback and exits with code 2.

    The message may quote names and values from an untrusted file, so control characters are escaped and its length is bounded."""

    field: str | None = None
    """The field that `invalid` named."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shortened(_printable(message)))


def invalid(field: str, got: Any, needs: str, fix: str) -> UserError:
    """Return (not raise) the error of an invalid value.

    Usage: `raise invalid("data.update_len", 1000, "a multiple of model.block_len (128)", "use 1024")`."""
    error = UserError(f"{field} is {got!r}, but it must be {needs}. Fix: {fix}.")
    error.field = field
    return error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'NAME'?" with the closest known name, or an empty string if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def _printable(message: str) -> str:
    """Join the lines into one and escape control and unprintable characters."""
    if message.isprintable():
        return message
    message = " ".join(message.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def _shortened(message: str) -> str:
    """Truncate in the middle: the end is kept because it names the fix."""
    if len(message) <= MAX_CHARACTERS:
        return message
    return f"{message[: MAX_CHARACTERS - 400]} ... {message[-390:]}"
