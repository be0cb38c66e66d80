"""Connections: slow headers, malformed requests, foreign host names, and errors at the end of a drain."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_model import FakeModel, talk
from waiting import PATIENCE, until

from linnet.cli import serve as serve_cli
from linnet.serve.http import lifecycle as lifecycles
from linnet.serve.http.app import make_app
from linnet.serve.http.batch import run_batch
from linnet.serve.http.connection import Connection
from linnet.serve.http.lifecycle import DrainingServer, Lifecycle, server_config

ASK = {"prompt": "abc", "max_tokens": 4, "seed": 0}


@contextmanager
def serving(model: FakeModel, drain_seconds: float = 5.0) -> Iterator[tuple[DrainingServer, int, threading.Thread]]:
    lifecycle = Lifecycle()
    app = make_app([model], keys=(), lifecycle=lifecycle, host="127.0.0.1")
    server = DrainingServer(server_config(app, "127.0.0.1", 0), lifecycle, drain_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1], thread
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _talk_raw(port: int, *parts: bytes, pause: float = 0.0) -> tuple[int, Any]:
    """Return status and body; the server must then close the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as line:
        for part in parts:
            line.sendall(part)
            time.sleep(pause)
        got = b""
        while more := line.recv(65536):
            got += more
    if not got:
        return 0, None
    top, _, body = got.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in top.lower()
    return int(top.split()[1]), json.loads(body)


@pytest.mark.parametrize("beginning", [b"GET /hea", b"GET /health HTTP/1.1\r\nhost: a\r\n"])
def test_incomplete_headers_time_out(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 1.5)  # far more than the parts take to be sent
    with serving(FakeModel()) as (_, port, _):
        status, body = _talk_raw(port, beginning, b"x", b"-", b"y", pause=0.03)
        assert (status, body["error"]["code"]) == (408, "slow_headers")


@pytest.mark.slow
def test_header_timeout_restarts_for_each_request_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Connection, "header_seconds", 1.0
    )  # far more than a client takes between connecting and sending
    with (
        serving(FakeModel(seconds_per_token=0.3)) as (_, port, _),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
    ):
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=ASK).status_code == 200  # an answer may take longer than headers may
        time.sleep(1.2)  # between two requests uvicorn's own limit counts
        assert http.get("/health").status_code == 200
        line = http.stream("GET", "/health")
        with line as response:
            response.read()
    with serving(FakeModel()) as (_, port, _):
        full = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw:
            raw.sendall(full)
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
            raw.sendall(full[:20])
            assert raw.recv(65536).startswith(b"HTTP/1.1 408")


def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 0.1)
    with serving(FakeModel()) as (_, port, _):
        status, _ = _talk_raw(port)
        assert status == 408


def test_keep_alive_exceeds_the_openai_clients() -> None:
    config = server_config(make_app([FakeModel()], keys=()), "127.0.0.1", 0)
    assert config.timeout_keep_alive > (openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0) + 1


def test_malformed_http_gets_an_api_error() -> None:
    with serving(FakeModel()) as (_, port, _):
        status, body = _talk_raw(port, b"\x16\x03\x01 hello\r\n\r\n")
        assert status == 400
        assert "invalid HTTP request" in body["error"]["message"]
        status, body = _talk_raw(port, b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (64 << 10))
        assert status == 431
        assert "headers" in body["error"]["message"]
        # In the middle of a body, too.
        top = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        assert _talk_raw(port, top + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n")[0] == 400
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:1", 200),
        ("LocalHost.", 200),
        ("[::1]:8000", 200),
        ("127.9.9.9", 200),
        ("my-machine:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.1", 403),
        ("[::2]:8000", 403),
        ("", 403),
    ],
)
def test_without_keys_only_loopback_host_names_are_allowed(name: str, status: int) -> None:
    async def get(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/v1/models", headers={"host": name})

    answer = talk(get, host="my-machine")
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "unknown_host"


def test_with_keys_any_host_name_is_allowed() -> None:
    async def get(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get(
            "/v1/models", headers={"host": "models.example", "authorization": "Bearer a-secret-key"}
        )

    assert talk(get, host="0.0.0.0", keys=["a-secret-key"]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_drain_timeout_sends_an_error(stream: bool) -> None:
    model, answers = FakeModel(held=True), []
    body = {**ASK, "max_tokens": 9999, "stream": stream}
    with serving(model, drain_seconds=0.2) as (server, port, thread):
        url = f"http://127.0.0.1:{port}/v1/completions"
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=PATIENCE)))
        asking.start()
        until(lambda: model.running)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        asking.join(PATIENCE)
    (answer,) = answers
    if stream:
        problem = json.loads(answer.text.strip().rpartition("\n\n")[2].removeprefix("data: "))
    else:
        assert answer.status_code == 503
        problem = answer.json()
    assert problem["error"]["code"] == "cancelled"


def test_startup_objects_are_frozen_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []
    monkeypatch.setattr(DrainingServer, "run", lambda self: frozen.append(gc.get_freeze_count()))
    try:
        lifecycles.run(lambda *_: None, Lifecycle(), host="127.0.0.1", port=0, has_keys=False)  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert frozen[0] > 1000


def test_batch_mode_reports_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": ASK} for i in range(3)]

    async def batch(_: httpx.AsyncClient) -> None:
        app = make_app([FakeModel()], keys=())
        await run_batch(app, lines[:1], tmp_path / "out", n_workers=1, key=None, log=serve_cli._progress())
        monkeypatch.setattr(serve_cli, "LOG_SECONDS", 0.0)
        await run_batch(app, lines, tmp_path / "out", n_workers=1, key=None, log=serve_cli._progress())

    talk(batch)
    output = ["1 of 1 requests done.", "1 of 2 requests done.", "2 of 2 requests done."]
    assert capsys.readouterr().err.splitlines() == output
