"""Limits per call and per API key: body size and upload time, tokens, answers, and concurrent calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from linnet.core.errors import invalid
from linnet.serve.http.errors import ApiError, ClientGone, too_many

Body = TypeVar("Body", bound=BaseModel)
MAX_HEADER_BYTES = 32 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    body_bytes: int = 4 << 20
    state_bytes: int = 256 << 20
    """Maximum size of a session file."""
    body_seconds: float = 30.0
    prompt_tokens: int = 1 << 20
    max_tokens: int = 1 << 16
    chat_tokens: int = 1024
    """Default of max_tokens for chat."""
    answers: int = 32
    """Maximum engine requests per call: prompts x best_of."""
    deadline_seconds: float = 3600.0
    calls_per_key: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise invalid(f"limits.{field.name}", value, "above 0", "omit it to use the default")


class Calls:
    """Limits the concurrent calls per API key."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def running(self, owner: str) -> Iterator[None]:
        if self._running[owner] >= self._max_calls:
            message = f"{self._max_calls} calls with this key are running, the maximum. Fix: wait until one ends."
            raise too_many(message, "too_many_calls", 1)
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]


def check_headers(headers: Headers) -> None:
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
        raise ApiError(
            431, f"the headers are larger than {MAX_HEADER_BYTES} bytes. Fix: send fewer or shorter headers."
        )


async def read_json(http: HttpRequest, kind: type[Body], limits: Limits, *, state_bytes: int = 0) -> Body:
    """Read and validate a JSON body. Other content types are rejected, because a foreign web page can make a browser send those with
    the user's credentials. `state_bytes`: maximum size of a state that the body may additionally contain."""
    _check_content_type(http, "application/json")
    max_bytes = limits.body_bytes + 4 * min(state_bytes, limits.state_bytes) // 3  # in base64
    return kind.model_validate_json(await read_bytes(http, max_bytes, limits.body_seconds))


async def read_file(http: HttpRequest, limits: Limits) -> bytes:
    _check_content_type(http, "application/octet-stream")
    return await read_bytes(http, limits.state_bytes, limits.body_seconds)


async def read_bytes(http: HttpRequest, max_bytes: int, seconds: float) -> bytes:
    """Read the body, never buffering more than `max_bytes` bytes, whatever the client declares or sends."""
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in http.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s. Fix: send it faster, or send less."
        raise ApiError(408, message, code="slow_body", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _check_content_type(http: HttpRequest, kind: str) -> None:
    got = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if got != kind:
        raise ApiError(
            415, f"the content type is {got[:100]!r}, but it must be {kind}. Fix: set the Content-Type header."
        )


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes. Fix: send a smaller one."
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})
