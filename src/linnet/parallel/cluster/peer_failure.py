"""Recognition of errors caused by a lost peer: a broken connection surfaces as an error of whatever JAX was doing."""

from __future__ import annotations

import re

STATUS = re.compile(r"(UNKNOWN|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): ")


def is_peer_failure(error: BaseException | None) -> bool:
    """Return whether the error, or one in its chain of causes, has a status of the JAX runtime. The exception class does not tell: it
    can be a ValueError or a JaxRuntimeError. The error may also be this process's own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if STATUS.match(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
