"""HTTP of the clients without input and output: requests, responses, errors, retries and server-sent events.

`Client` and `AsyncClient` share everything here and in `client_calls`. An operation is a generator that yields what it needs done
(send a request, wait, run other operations) and receives the results; each client performs these in its own way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from linnet.core.errors import LinnetError, UserError, invalid

MAX_WAIT = 30.0
"""Seconds: the longest wait before a retry, also if the server suggests a longer one."""
FIRST_WAIT = 0.5
"""Seconds before the first retry if the server suggests none; it doubles with each retry."""
RETRIED = (429, 503)
MAX_BODY_IN_MESSAGE = 300
DONE = "[DONE]"

T = TypeVar("T")


class ServerError(LinnetError):
    """The server answered with an error. Its message contains the fix."""

    status: int | None
    """HTTP status; None if the error came after the start of a stream."""
    message: str
    """The server's message."""
    code: str | None
    """The server's error code, such as `session_not_found`."""
    param: str | None
    """The field that is wrong, if there is one."""
    request_id: str | None
    """The id of the request in the server's log."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        known = [f"status {status}"] if status is not None else []
        known += [f"request id {request_id}"] if request_id is not None else []
        super().__init__(f"{message} ({', '.join(known)})" if known else message)
        self.message, self.status, self.code = message, status, code
        self.param, self.request_id = param, request_id


class ServerConnectionError(LinnetError):
    """No server answered, or the connection failed before the answer was complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpRequest:
    method: str
    path: str
    json: Mapping[str, Any] | None = None
    content: bytes | None = None
    query: Mapping[str, str] | None = None
    is_stream: bool = False
    """The body of a successful response is left to be read event by event."""
    accepts: tuple[int, ...] = ()
    """Statuses that are no errors, besides 2xx."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: Any = None
    """The client library's response, if its body is not read yet."""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise ServerError(
                "the response is not JSON, so this is not a Linnet server. Fix: check the address.",
                status=self.status,
                request_id=self.headers.get("x-request-id"),
            ) from None


@dataclasses.dataclass(frozen=True)
class Wait:
    seconds: float


@dataclasses.dataclass(frozen=True)
class Gather:
    """Operations to run concurrently; their results are returned in order."""

    operations: Sequence[Operation[Any]]


Effect: TypeAlias = HttpRequest | Wait | Gather
Operation: TypeAlias = Generator[Effect, Any, T]


def send(request: HttpRequest, retries: int) -> Operation[HttpResponse]:
    """Send a request; an overloaded server is asked again, at most `retries` times."""
    attempt = 0
    while True:
        response: HttpResponse = yield request
        if response.status < 300 or response.status in request.accepts:
            return response
        if attempt == retries or not _is_retried(response):
            raise error_of(response)
        yield Wait(retry_wait(response, attempt))
        attempt += 1


def _is_retried(response: HttpResponse) -> bool:
    return response.status in RETRIED and response.headers.get("x-should-retry") != "false"


def retry_wait(response: HttpResponse, attempt: int) -> float:
    """Return the seconds to wait: those that the server suggests, or twice as long with each attempt."""
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        seconds = FIRST_WAIT * 2**attempt
    return min(max(0.0, seconds), MAX_WAIT)


def error_of(response: HttpResponse) -> ServerError:
    request_id = response.headers.get("x-request-id")
    try:
        found = json.loads(response.body)["error"]
        message, code, param = found["message"], found.get("code"), found.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = response.body.decode(errors="replace").strip()[:MAX_BODY_IN_MESSAGE]
        message, code, param = text or "the response has no message", None, None
    return ServerError(str(message), status=response.status, code=code, param=param, request_id=request_id)


def unreachable(url: str, reason: str) -> ServerConnectionError:
    detail = f" ({reason})" if reason else ""
    return ServerConnectionError(
        f"no server answers at {url}{detail}. Fix: start one with `linnet serve RUN`, or check the address."
    )


def timed_out(url: str, seconds: float) -> ServerConnectionError:
    return ServerConnectionError(
        f"the server at {url} did not answer within {seconds:g} s. Fix: raise `timeout`, or request fewer tokens."
    )


def broken_off(url: str, reason: str) -> ServerConnectionError:
    return ServerConnectionError(
        f"the connection to {url} ended before the answer was complete ({reason}). Fix: see the server's log; try again."
    )


def check_url(url: str) -> str:
    """Return the server's address without a trailing slash or `/v1`."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise invalid("url", url, "an address with http:// or https://", 'use "http://127.0.0.1:8000"')
    return url.rstrip("/").removesuffix("/v1")


def headers_for(api_key: str | None, version: str) -> dict[str, str]:
    headers = {"user-agent": f"linnet/{version}"}
    if api_key is None:
        return headers
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise UserError("api_key must be printable ASCII. Fix: check the key, or omit it.")
    return {**headers, "authorization": f"Bearer {api_key}"}


class EventDecoder:
    """Splits the bytes of a stream into the JSON of its events.

    Lines end with LF only: the characters U+2028 and U+0085, which generated text may contain, are no line ends here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False
        """Whether the stream sent its end."""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            text = line.removeprefix(b"data: ").decode()
            if text == DONE:
                self.is_done = True
                continue
            event = json.loads(text)
            if "error" in event:
                error = event["error"]
                raise ServerError(error["message"], code=error.get("code"), param=error.get("param"))
            yield event
