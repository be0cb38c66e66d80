"""Batch mode: requests from a JSONL file, responses to a JSONL file. Each line goes through the same app as a network request.

Lines are in OpenAI's batch format. Each response is written as soon as it is complete, so that a killed batch resumes with what is
missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from starlette.types import ASGIApp, Message

from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json

RETRY_SECONDS = 0.2


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read and validate all lines, before the first is sent."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(
            "--batch", str(path), f"a file of JSON lines that can be read ({error})", "check the path"
        ) from None
    lines: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            name, url, body = value["custom_id"], value["url"], value["body"]
            if not (isinstance(name, str) and isinstance(url, str) and url.startswith("/") and isinstance(body, dict)):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            needs = 'an object with "custom_id", "url" and "body"'
            raise invalid(f"line {number} of {path}", line[:80], needs, "see OpenAI's batch format") from None
        if body.get("stream"):
            raise invalid(f"line {number} of {path}", "stream: true", "a request without stream", "omit stream")
        if name in seen:
            raise invalid(f"custom_id of line {number} of {path}", name, "unique", "rename it")
        seen.add(name)
        lines.append(value)
    return lines


def answered_ids(path: Path) -> set[str]:
    """Return the ids that an earlier attempt answered. An incomplete last line is removed from the file."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    try:
        names = {parse_json(line)["custom_id"] for line in complete.splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise invalid(
            "the output file", str(path), "responses of this batch, or a new file", "choose another file"
        ) from None
    if complete != content:
        os.truncate(path, len(complete))  # in place, so that the lines before it are never at risk
    return names


async def run_batch(
    app: ASGIApp,
    lines: list[dict[str, Any]],
    out: Path,
    *,
    n_workers: int,
    key: str | None,
    log: Callable[[int, int], None],
) -> tuple[int, int]:
    """Run the lines that have no response yet. Returns how many were run and how many failed. `log(n, total)` reports progress."""
    known = answered_ids(out)
    to_do = [line for line in lines if line["custom_id"] not in known]
    left = iter(to_do)
    n_done = n_failed = 0

    async def work(lines: Iterator[dict[str, Any]], file: TextIO) -> None:
        nonlocal n_done, n_failed
        for line in lines:
            status, body = await _call_with_retries(app, line["url"], line["body"], key)
            answer = {"custom_id": line["custom_id"], "response": {"status_code": status, "body": body}}
            file.write(json.dumps(answer) + "\n")
            file.flush()
            n_done += 1
            n_failed += status != 200
            log(n_done, len(to_do))

    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(out, "a", encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{out} cannot be written ({error.strerror}). Fix: choose another file.") from None
        await asyncio.gather(*(work(left, file) for _ in range(n_workers)))
    return n_done, n_failed


async def _call_with_retries(app: ASGIApp, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
    """Call the app, retrying while the queue is full."""
    while True:
        status, content = await call(app, path, body, key)
        if status != 429:
            return status, json.loads(content)
        await asyncio.sleep(RETRY_SECONDS)


async def call(app: ASGIApp, path: str, body: dict[str, Any], key: str | None) -> tuple[int, bytes]:
    """Send one POST request to the app in process."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("batch", 0),
        "server": ("batch", 0),
        "state": {},
    }
    status, parts, sent = 500, [], False
    finished = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}
        await finished.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                finished.set()

    await app(scope, receive, send)
    return status, b"".join(parts)
