"""The app on a real socket: the official openai client, dropped connections, and draining."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_model import FakeModel
from waiting import PATIENCE, until

from linnet.serve.http.app import make_app
from linnet.serve.http.lifecycle import DrainingServer, Lifecycle, server_config
from linnet.serve.http.limits import Limits

KEY = "a-secret-key"


@contextlib.contextmanager
def serving(*models: FakeModel, drain_seconds: float = 5.0, **limits: Any) -> Iterator[tuple[DrainingServer, str, Any]]:
    lifecycle = Lifecycle()
    app = make_app(models, keys=[KEY], limits=Limits(**limits), lifecycle=lifecycle)
    server = DrainingServer(server_config(app, "127.0.0.1", 0), lifecycle, drain_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}", thread
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _http(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serving(FakeModel("text"), FakeModel("pixels", shape=(2, 2, 3))) as (_, url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def test_openai_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["text", "pixels"]
    assert client.models.retrieve("pixels").owned_by == "linnet"


def test_openai_client_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="text", prompt="ab", max_tokens=4, seed=0, logprobs=1, n=2)
    assert [choice.text for choice in answer.choices] == ["abab", "baba"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


def test_openai_client_streams_completions(client: openai.OpenAI) -> None:
    prompt = "日本語 🐦 "
    options: Any = {"include_usage": True}
    stream = client.completions.create(
        model="text", prompt=prompt, max_tokens=18, seed=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == (prompt * 2).encode()[:18].decode()
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 18


def test_openai_client_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="text",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=20,
        seed=0,
        stop=["\n"],
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}},
        extra_body={"top_k": 5},
    )
    choice = answer.choices[0]
    assert choice.message.content == "user: hi"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    again: Any = [choice.message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="text", messages=again, max_tokens=2).choices


def test_openai_client_streams_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="text", messages=[{"role": "user", "content": "hi"}], max_tokens=8, seed=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user: hi"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openai_client_images(client: openai.OpenAI) -> None:
    answer = client.images.generate(model="pixels", prompt="", response_format="b64_json")
    assert answer.data is not None
    assert base64.b64decode(answer.data[0].b64_json or "").startswith(b"\x89PNG")
    events = list(client.images.generate(model="pixels", prompt="", stream=True, partial_images=1))
    assert events[-1].type == "image_generation.completed"


def test_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field") as rejection:
        client.completions.create(model="text", prompt="a", suffix="b")
    assert rejection.value.param == "suffix"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="a")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="text", prompt="BOOM")
    with pytest.raises(openai.APIError, match="the batch failed"):
        list(client.completions.create(model="text", prompt="BOOM", stream=True))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another-key").models.list()


def test_dropped_connection_cancels_immediately() -> None:
    """The model is blocked, so a request can end only by cancellation."""
    model, body = FakeModel(held=True), {"prompt": "abc", "max_tokens": 10_000}
    with serving(model) as (_, url, _), _http(url) as http:
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            next(response.iter_bytes())
        until(lambda: not model.running)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as line:
            text = json.dumps(body)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
            line.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            until(lambda: len(model.requests) == 2)
        until(lambda: not model.running)
    assert model.cancelled == {request.id for request in model.requests}


def test_header_size_is_limited() -> None:
    with serving(FakeModel()) as (_, url, _), _http(url) as http:
        assert http.get("/health", headers={"x-long": "a" * 65_536}).status_code in (400, 431)
        assert http.get("/health").status_code == 200


def test_signal_lets_running_requests_finish() -> None:
    model = FakeModel(held=True)
    with serving(model, drain_seconds=PATIENCE) as (server, url, thread), _http(url) as http:
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 90, "stream": True}
        ) as running:
            lines = running.iter_lines()
            next(lines)
            server.handle_exit(signal.SIGTERM, None)
            time.sleep(0.3)  # several of the server's own looks: the door must still be open
            with _http(url) as other:
                assert other.get("/ready").status_code == 503
                assert other.get("/health").status_code == 200
                assert other.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            model.gate.set()
            assert list(lines)[-2] == "data: [DONE]"
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not model.cancelled


def test_drain_has_a_time_limit() -> None:
    model = FakeModel(held=True)
    with (
        serving(model, drain_seconds=0.2) as (server, url, thread),
        _http(url) as http,
        http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 9999, "stream": True}) as running,
    ):
        next(running.iter_lines())
        server.handle_exit(signal.SIGTERM, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert model.cancelled == {model.requests[0].id}
