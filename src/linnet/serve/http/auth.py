"""Who may ask. Keys are compared as digests and in constant time, and a log or metric never sees more than a digest's beginning."""

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
FEWEST_CHARACTERS = 8


class Keys:
    """No keys: everyone may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if len(key) < FEWEST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                needs = f"at least {FEWEST_CHARACTERS} printable ASCII characters without spaces"
                raise invalid("an API key", f"of {len(key)} characters", needs, "make one with `openssl rand -hex 24`")
        self._digests = [_digest(key) for key in keys]

    def owner(self, path: str, authorization: str | None) -> str:
        """A short name for the key, or an error 401."""
        if not self._digests or path in OPEN_PATHS:
            return "anyone"
        digest = _digest(_key_of(authorization))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, whichever it is
        if any(matches):
            return digest.hex()[:8]
        # A browser asks for a password only if it is told so; the page's own calls then carry it along.
        scheme = "Basic" if path == "/" else "Bearer"
        raise ApiError(
            401,
            "there is no valid API key. Fix: send the header `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"www-authenticate": f'{scheme} realm="linnet"'},
        )


class AllowedHosts:
    """The names by which this server may be called while everyone may ask.

    A foreign page can make its visitor's browser call us under the page's own name, once that name leads to 127.0.0.1 (DNS
    rebinding), and then read what we answer. The browser still tells that name as the host.
    """

    def __init__(self, bound: str | None) -> None:
        """`bound` is the address served on; None: any name will do, since keys guard the door or there is none."""
        self._bound = bound

    def check(self, host: str | None) -> None:
        if self._bound is None or host is None:  # only HTTP/1.0 leaves it out, which no browser speaks
            return
        name = _without_port(host)
        if name != self._bound.lower() and not is_loopback(name):
            message = f"this server does not answer under the name {name[:100]!r}"
            raise ApiError(403, f"{message}. Fix: call it as 127.0.0.1, or serve with API keys.", code="unknown_host")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_port(host: str) -> str:
    """`Name:8000`, `[::1]:8000` and `::1` alike, in small letters."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower().removesuffix(".")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(authorization: str | None) -> str:
    """The token of Bearer, or the password of Basic (the user name does not matter)."""
    scheme, _, rest = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""
