"""Errors that are only a lost process's echo: a connection that broke shows as whatever JAX happened to be doing."""

from __future__ import annotations

import re

STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): ")


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether a status of JAX's runtime is at the bottom of it, whoever passed it on. The class says little: it is a ValueError as
    often as a JaxRuntimeError. It may also be an error of this process's own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if STATUS.match(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
