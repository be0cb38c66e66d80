"""Download one file: resumable, with size and checksum verified, and renamed into place only when complete."""

from __future__ import annotations

import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from linnet.core.errors import UserError
from linnet.data.sources.files import reading, writing

MAX_TRIES = 5
"""Maximum attempts without a single new byte; attempts that make progress are not limited."""
PAUSE_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
BLOCK_BYTES = 1 << 20
WRITE_FIX = "free some space there, or give the file with --from PATH"
TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

Progress = Callable[[int, int | None], None]
"""Callback with the bytes done, and the total if known."""


class _ConnectionLost(Exception):
    """The connection failed in a way that may be transient."""


def download_file(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    size: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download `url` to `path`. An existing file is verified and kept; `path`.part is resumed."""
    checksum = ("sha256", sha256) if sha256 else ("md5", md5) if md5 else None
    if path.exists():
        if mismatch := _find_mismatch(path, checksum, size):
            raise UserError(f"{path} is not the file from {url}: {mismatch}. Fix: remove it to download it again.")
        return path
    part = path.with_name(path.name + ".part")
    with writing(part, WRITE_FIX):
        path.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.exists()
    _download(url, path, part, size, progress)
    mismatch = _find_mismatch(part, checksum, size)
    if mismatch and resumed:  # the existing part may belong to another file
        part.unlink()
        _download(url, path, part, size, progress)
        mismatch = _find_mismatch(part, checksum, size)
    if mismatch:
        part.unlink()
        raise UserError(
            f"{url} did not return the expected file: {mismatch}. Fix: try again later, or give the right file "
            "with --from PATH."
        )
    with writing(path, WRITE_FIX):
        part.replace(path)
    return path


def read_url(url: str, instead: str) -> bytes:
    """Return a small response. `instead` is the advice for the case without a network."""
    attempt = 0
    while True:
        try:
            with _open(url, 0) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            attempt += 1
            if attempt >= MAX_TRIES or not _is_transient(error):
                raise UserError(f"{url} cannot be downloaded ({_reason(error)}). Fix: {instead}.") from None
        time.sleep(PAUSE_SECONDS * attempt)


def _download(url: str, path: Path, part: Path, size: int | None, progress: Progress | None) -> None:
    """Fill `part`, reconnecting as long as there is progress."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _stream(url, part, before, size, progress)
            return
        except _ConnectionLost as dropped:
            has_progress = part.exists() and part.stat().st_size > before
            failures = 1 if has_progress else failures + 1
            if failures >= MAX_TRIES:
                raise _unreachable(url, path, str(dropped)) from None
        except urllib.error.HTTPError as error:
            raise _unreachable(url, path, _reason(error)) from None
        time.sleep(PAUSE_SECONDS * failures)


def _stream(url: str, part: Path, offset: int, size: int | None, progress: Progress | None) -> None:
    """Append to `part` what the server sends from `offset` on, over one connection."""
    try:
        response = _open(url, offset)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
            if _range_total(error.headers) == offset:
                return  # it was complete, but not yet renamed
            part.unlink()
            raise _ConnectionLost("the part downloaded before is longer than the file") from None
        if _is_transient(error):
            raise _ConnectionLost(_reason(error)) from None
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _ConnectionLost(_reason(error)) from None
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT or _range_start(response.headers) != offset:
            if response.status == HTTPStatus.PARTIAL_CONTENT and _range_start(response.headers) != 0:
                part.unlink(missing_ok=True)
                raise _ConnectionLost("the server sent another range than requested")
            offset = 0  # the server does not support ranges: restart from the beginning
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else size
        with writing(part, WRITE_FIX):
            file = open(part, "ab" if offset else "wb")  # noqa: SIM115 (closed below, apart from the network's errors)
        with file:
            done = offset
            while data := _next_block(response):
                with writing(part, WRITE_FIX):
                    file.write(data)
                done += len(data)
                if progress:
                    progress(done, total)
            with writing(part, WRITE_FIX):
                file.flush()
    if total is not None and done < total:
        raise _ConnectionLost(f"the connection ended after {done:,} of {total:,} bytes")


def _next_block(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _ConnectionLost(_reason(error)) from None


def _open(url: str, offset: int) -> Any:
    headers = {"User-Agent": "linnet", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection; only its status and headers are needed
        raise


def _range_start(headers: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _range_total(headers: Any) -> int | None:
    match = re.search(r"/(\d+)$", headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _is_transient(error: BaseException) -> bool:
    return not isinstance(error, urllib.error.HTTPError) or error.code >= 500 or error.code in TRANSIENT


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server returned {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _unreachable(url: str, path: Path, reason: str) -> UserError:
    return UserError(
        f"{url} cannot be downloaded ({reason}). Fix: download it on a machine with network access and put it at {path}, or give it "
        "with --from PATH."
    )


def _find_mismatch(path: Path, checksum: tuple[str, str] | None, size: int | None) -> str | None:
    with reading(path):
        actual_size = path.stat().st_size
    if size is not None and actual_size != size:
        return f"it has {actual_size:,} bytes, not {size:,}"
    if checksum:
        algorithm, expected = checksum
        with reading(path), open(path, "rb") as file:
            actual = hashlib.file_digest(file, algorithm).hexdigest()
        if actual != expected:
            return f"its {algorithm} is {actual}, not {expected}"
    return None
