"""Start, call and stop a real `linnet serve` process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.http_clients import count_tokens

MAX_READY_SECONDS = 300.0
POLL_SECONDS = 0.02


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, ready_seconds: float) -> None:
        self.process, self.port, self.ready_seconds = process, port, ready_seconds

    def first_token_seconds(self, prompt: Sequence[int]) -> float:
        """Return the time from sending a request to receiving the first token, on an open connection."""
        request = {
            "prompt": list(prompt),
            "max_tokens": 2,
            "ignore_eos": True,
            "stream": True,
            "seed": 1,
            "return_token_ids": True,
        }
        connection = self._connection()
        body = json.dumps(request)
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read(2000)
        took = None
        while line := response.readline():
            if took is None and line.startswith(b"data: {") and count_tokens(line[6:]):
                took = time.perf_counter() - began
        connection.close()
        assert took is not None, "the stream ended without a token"
        return took

    def call(self, method: str, path: str, body: Any = None) -> tuple[bytes, float]:
        """Send a JSON object or bytes, and return the response body and the seconds it took."""
        is_file = isinstance(body, bytes)
        headers = {"Content-Type": "application/octet-stream" if is_file else "application/json"}
        sent = body if is_file or body is None else json.dumps(body)
        connection = self._connection()
        connection.connect()
        began = time.perf_counter()
        connection.request(method, path, sent, headers)
        response = connection.getresponse()
        content = response.read()
        took = time.perf_counter() - began
        connection.close()
        assert response.status == 200, content[:2000]
        return content, took

    def is_ready(self) -> bool:
        connection = self._connection()
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120.0)


@contextmanager
def serving(run: Path, cache: Path, *flags: str) -> Iterator[Server]:
    """Start a server with its compilation cache in `cache`. `ready_seconds` is the time from process start to the first `/ready`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "from linnet.cli import main; main()",
        "serve",
        str(run),
        "--port",
        str(port),
        *flags,
    ]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "LINNET_API_KEYS": ""}
    log = run.parent / f"server-{port}.log"
    with log.open("wb") as lines:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=lines, stderr=lines)
        server = Server(process, port, 0.0)
        try:
            while not server.is_ready():
                if process.poll() is not None or time.perf_counter() - began > MAX_READY_SECONDS:
                    raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-4000:]}")
                time.sleep(POLL_SECONDS)
            server.ready_seconds = time.perf_counter() - began
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=20.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
