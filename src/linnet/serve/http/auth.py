"""API keys and the Host check. Keys are compared as digests in constant time; logs and metrics contain at most a digest's prefix."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from linnet.core.errors import invalid
from linnet.serve.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
MIN_KEY_CHARACTERS = 8


class ApiKeys:
    """The API keys; if empty, no authentication is required."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                needs = f"at least {MIN_KEY_CHARACTERS} printable ASCII characters without spaces"
                raise invalid(
                    "an API key", f"of {len(key)} characters", needs, "create one with `openssl rand -hex 24`"
                )
        self._digests = [_digest(key) for key in keys]

    def owner(self, path: str, authorization: str | None) -> str:
        """Return a short name of the key; raises a 401 error if it is not valid."""
        if not self._digests or path in OPEN_PATHS:
            return "anyone"
        digest = _digest(_key_of(authorization))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # compare all, for constant time
        if any(matches):
            return digest.hex()[:8]
        # Basic makes a browser show its password dialog; the playground's own calls then send the same credentials.
        scheme = "Basic" if path == "/" else "Bearer"
        raise ApiError(
            401,
            "missing or invalid API key. Fix: send the header `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"www-authenticate": f'{scheme} realm="linnet"'},
        )


class AllowedHosts:
    """Host header check for servers without API keys.

    With DNS rebinding, a foreign page can resolve its own name to 127.0.0.1, make a visitor's browser call this server, and read the
    responses. The browser still sends that name in the Host header.

    Starlette's TrustedHostMiddleware matches names literally: it would reject other loopback addresses (127.0.0.2), `localhost.`, and
    HTTP/1.0 clients that send no Host header. It also responds in plain text with status 400 instead of an API error.
    """

    def __init__(self, bound: str | None) -> None:
        """`bound`: the address served on; None allows any name, because API keys are required or the server is not on a network."""
        self._bound = bound

    def check(self, host: str | None) -> None:
        if self._bound is None or host is None:  # only HTTP/1.0 omits it, and no browser uses that
            return
        name = _without_port(host)
        if name != self._bound.lower() and not is_loopback(name):
            message = f"the host name {name[:100]!r} is not allowed"
            raise ApiError(
                403, f"{message}. Fix: use 127.0.0.1, or start the server with API keys.", code="unknown_host"
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_port(host: str) -> str:
    """Return the lowercase host name of `Name:8000`, `[::1]:8000` or `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower().removesuffix(".")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(authorization: str | None) -> str:
    """Return the token of a Bearer header, or the password of a Basic header (the user name is ignored)."""
    scheme, _, rest = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
