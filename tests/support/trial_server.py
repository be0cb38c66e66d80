"""A real `linnet serve` process on a tiny run, its memory, and clients so small that what they measure is the server."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import free_port, train_tiny

START_SECONDS = 120


@functools.cache
def tiny_run() -> Path:
    """Trained once for all modules that ask."""
    folder = Path(tempfile.mkdtemp(prefix="linnet-trials-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return train_tiny(folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss(self) -> int:
        """Bytes of memory it holds now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    def stats(self) -> dict[str, float]:
        """The engine's counts."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as answer:  # httpx takes long to begin
            text = answer.read().decode()
        found = re.findall(r"^linnet_engine_(\w+?)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def n_busy(self) -> int:
        stats = self.stats()
        return int(stats["running"] + stats["reading"] + stats["waiting"] + stats["parked"])

    def log_lines(self) -> list[dict[str, Any]]:
        """What it logged about calls."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextlib.contextmanager
def serving(*flags: str, slots: int = 8) -> Iterator[Server]:
    run, port = tiny_run(), free_port()
    log = run.parent / f"server-{port}.log"
    program = str(Path(sys.executable).with_name("linnet"))
    command = [program, "serve", str(run), "--port", str(port), "--slots", str(slots), *flags]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env={**os.environ, "LINNET_API_KEYS": ""}, stderr=file)
    server = Server(port=port, process=process, log=log)
    try:
        wait_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


@functools.cache
def shared_server() -> Server:
    """One for all tests that leave a server as it was: to start one takes longer than most of them."""
    stack = contextlib.ExitStack()
    server = stack.enter_context(serving("--queue", "64", slots=8))
    atexit.register(stack.close)
    return server


def wait_ready(server: Server) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.address}/ready", timeout=5).status_code == 200:
                return
        if server.process.poll() is not None:
            pytest.fail(f"the server ended: {server.log.read_text()}")
        time.sleep(0.05)
    pytest.fail(f"the server was not ready within {START_SECONDS} s")


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes
    seconds: float
    """From the request's last byte to the answer's."""

    def json(self) -> Any:
        return json.loads(self.content)


def head(body: bytes, path: str = "/v1/completions", more: str = "") -> bytes:
    text = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{more}"
    return f"{text}content-length: {len(body)}\r\n\r\n".encode()


class Client:
    """One connection, kept open; one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Leaves without a word."""
        if self._pipe is not None:
            self._pipe[1].transport.abort()
            self._pipe = None

    async def send(self, body: Mapping[str, Any] | bytes, path: str = "/v1/completions") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self._pipe is None:
            self._pipe = await asyncio.open_connection("127.0.0.1", self._port)
        self._pipe[1].write(head(data, path) + data)
        await self._pipe[1].drain()

    async def ask(self, body: Mapping[str, Any] | bytes, path: str = "/v1/completions") -> Answer:
        if self._pipe is None:  # the handshake is not the server's time
            self._pipe = await asyncio.open_connection("127.0.0.1", self._port)
        start = time.perf_counter()
        await self.send(body, path)
        status, headers = await self.read_head()
        content = await self._pipe[0].readexactly(int(headers["content-length"]))
        seconds = time.perf_counter() - start
        if headers.get("connection") == "close":
            self.drop()
        return Answer(status, headers, content, seconds)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        assert self._pipe is not None
        first, *rest = (await self._pipe[0].readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        pairs = (line.partition(": ") for line in rest)
        return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
        """The events of a streamed answer and when they came."""
        await self.send({**body, "stream": True})
        status, headers = await self.read_head()
        assert status == 200, status
        assert headers["transfer-encoding"] == "chunked"
        async for event in self.events():
            yield event

    async def events(self) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
        assert self._pipe is not None
        reader, left = self._pipe[0], b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            left += (await reader.readexactly(size + 2))[:-2]
            now = time.perf_counter()
            *full, left = left.split(b"\n\n")
            for event in full:
                data = event.removeprefix(b"data: ")
                if data != b"[DONE]":
                    yield now, json.loads(data)
        await reader.readexactly(2)


async def text_of(client: Client, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """A streamed answer's text and how it ended."""
    text, reason = "", None
    async for _, event in client.stream(body):
        for choice in event.get("choices", ()):
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return text, reason


def asking(n_tokens: int, seed: int, prompt: str = "linear time ") -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": n_tokens, "seed": seed, "ignore_eos": True}
