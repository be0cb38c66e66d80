"""What both clients need of httpx: its settings, its arguments for a request, and its errors as those of the API."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from linnet.api import client_http
from linnet.api.client_http import HttpRequest
from linnet.core.version import __version__

CONNECT_SECONDS = 10.0


def http_settings(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Return the arguments of httpx's clients."""
    import httpx

    return {
        "base_url": url,
        "headers": client_http.headers_for(api_key, __version__),
        "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
    }


def request_fields(request: HttpRequest) -> dict[str, Any]:
    headers = {"content-type": "application/octet-stream"} if request.content is not None else None
    return {
        "method": request.method,
        "url": request.path,
        "json": request.json,
        "content": request.content,
        "params": request.query,
        "headers": headers,
    }


class api_errors:
    """A context that converts errors of httpx to those of the API."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        import httpx

        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            raise client_http.unreachable(self._url, str(error)) from None
        if isinstance(error, httpx.TimeoutException):
            raise client_http.timed_out(self._url, self._timeout) from None
        if isinstance(error, httpx.TransportError):
            raise client_http.broken_off(self._url, str(error) or type(error).__name__) from None
