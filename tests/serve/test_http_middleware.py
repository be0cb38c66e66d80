"""Middleware and limits with a fake engine: keys, limits, metrics, OpenAPI document, drain, failures, disconnects."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, ask, talk

from linnet.core.errors import UserError
from linnet.serve.http import openai_text
from linnet.serve.http.app import ENDPOINTS, make_app
from linnet.serve.http.lifecycle import Lifecycle, check_host
from linnet.serve.http.limits import Limits

KEY = "a-secret-key"
ASK = {"prompt": "abc", "max_tokens": 4, "seed": 0}


def get(path: str, model: FakeModel | None = None, headers: Any = None, **more: Any) -> httpx.Response:
    return talk(lambda client: client.get(path, headers=headers), model, **more)


def test_all_routes_except_probes_require_a_key() -> None:
    async def all_routes(client: httpx.AsyncClient) -> dict[str, httpx.Response]:
        return {f"{one.method} {one.path}": await client.request(one.method, one.path) for one in ENDPOINTS}

    for route, response in talk(all_routes, keys=[KEY]).items():
        if route in ("GET /health", "GET /ready"):
            assert response.status_code == 200
        else:
            assert response.status_code == 401, route
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].startswith("Basic" if route == "GET /" else "Bearer")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        ("Bearer other-key-2", 200),
        ("Basic " + base64.b64encode(f"me:{KEY}".encode()).decode(), 200),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        ("Bearer ", 401),
        ("Basic %%%", 401),
        (KEY, 401),
    ],
)
def test_keys(authorization: str, status: int) -> None:
    response = get("/v1/models", headers={"authorization": authorization}, keys=[KEY, "other-key-2"])
    assert response.status_code == status


def test_weak_keys_and_public_hosts_without_keys_are_rejected() -> None:
    with pytest.raises(UserError, match="API key"):
        make_app([FakeModel()], keys=[""])
    with pytest.raises(UserError, match="--host"):
        check_host("0.0.0.0", has_keys=False)
    check_host("0.0.0.0", has_keys=True)
    check_host("::1", has_keys=False)
    with pytest.raises(UserError, match="models"):
        make_app([FakeModel(), FakeModel()], keys=())


def test_oversized_body_is_rejected_before_it_is_read() -> None:
    n_read = 0

    async def endless():
        nonlocal n_read
        for _ in range(1000):
            n_read += 1
            yield b" " * 1000

    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})

    limits = Limits(body_bytes=10_000, state_bytes=1)
    response = talk(one, limits=limits)
    assert response.status_code == 413
    assert n_read < 20
    claimed = ask("/v1/completions", {"prompt": "x" * 20_000}, limits=limits)
    assert claimed.status_code == 413
    assert claimed.json()["error"]["code"] == "body_too_large"


def test_slow_body_times_out() -> None:
    async def slow():
        for _ in range(100):
            await asyncio.sleep(0.02)
            yield b" "

    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=slow(), headers={"content-type": "application/json"})

    assert talk(one, limits=Limits(body_seconds=0.1)).status_code == 408


def test_other_content_types_are_rejected() -> None:
    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})

    assert talk(one).status_code == 415


def test_full_queue_is_429_and_releases_resources() -> None:
    model = FakeModel(most=2, held=True)
    response = ask("/v1/completions", {**ASK, "n": 3}, model)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert model.cancelled == {request.id for request in model.requests}
    assert len(model.requests) == 2


def test_concurrent_calls_per_key_are_limited() -> None:
    async def three(client: httpx.AsyncClient) -> list[int]:
        calls = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(3)]
        await asyncio.wait(
            calls, return_when=asyncio.FIRST_COMPLETED
        )  # the one that is rejected: the model holds the others
        model.gate.set()
        first = sorted(response.status_code for response in await asyncio.gather(*calls))
        return [*first, (await client.post("/v1/completions", json=ASK)).status_code]

    model = FakeModel(held=True)
    assert talk(three, model, limits=Limits(calls_per_key=2)) == [200, 200, 429, 200]


def test_draining_server_rejects_new_requests() -> None:
    lifecycle = Lifecycle()
    lifecycle.drain()
    assert get("/ready", lifecycle=lifecycle).status_code == 503
    assert get("/health", lifecycle=lifecycle).status_code == 200
    assert ask("/v1/completions", ASK, lifecycle=lifecycle).status_code == 503
    model = FakeModel()
    model.is_draining = True  # the engine says so itself
    response = ask("/v1/completions", {**ASK, "stream": True}, model)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"


def test_unexpected_exception_is_a_500_with_request_id(caplog: pytest.LogCaptureFixture) -> None:
    async def two(client: httpx.AsyncClient) -> list[httpx.Response]:
        bad = await client.post("/v1/completions", json={"prompt": "RAISE"})
        return [bad, await client.post("/v1/completions", json=ASK)]

    with caplog.at_level(logging.INFO, "linnet"):
        bad, good = talk(two)
    assert (bad.status_code, good.status_code) == (500, 200)
    id = bad.headers["x-request-id"]
    assert id in bad.json()["error"]["message"]
    assert "a bug in the engine" not in bad.text
    logged = [json.loads(record.message) for record in caplog.records if record.name.startswith("linnet.")]
    failures = [line for line in logged if "failure" in line]
    assert failures[0]["request_id"] == id
    assert "a bug in the engine" in "".join(failures[0]["failure"])
    lines = [line for line in logged if "status" in line]
    assert [(line["status"], line["path"], line["request_id"]) for line in lines] == [
        (500, "/v1/completions", id),
        (200, "/v1/completions", good.headers["x-request-id"]),
    ]


def test_unknown_paths_methods_and_models() -> None:
    assert get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert get("/v1/completions").status_code == 405
    assert get("/v1/completions").headers["x-request-id"].startswith("req_")
    missing = ask("/v1/completions", {**ASK, "model": "gpt"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


class Caller:
    """A raw ASGI call, for clients that disconnect or do not read."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.got: list[bytes] = []

    async def call(self, client: httpx.AsyncClient) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await client._transport.app(scope, self._receive, self._send)  # type: ignore[attr-defined]

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.got.append(message.get("body", b""))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_client_disconnect_cancels_its_request(stream: bool, reads: bool) -> None:
    model = FakeModel(held=True)  # the request would never end by itself

    async def leave(client: httpx.AsyncClient) -> None:
        caller = Caller({**ASK, "max_tokens": 1000, "stream": stream, "session": model.sessions.create()})
        if not reads:
            caller.reads.clear()
        call = asyncio.create_task(caller.call(client))
        while not model.requests:
            await asyncio.sleep(0.005)
        caller.gone.set()
        await call
        model.gate.set()
        again = await client.post("/v1/completions", json={**ASK, "session": "session-0"})
        assert again.status_code == 200  # the session is free again, and where it was
        assert again.json()["choices"][0]["text"] == "abca"

    talk(leave, model)
    assert model.cancelled == {model.requests[0].id}


def test_slow_reader_delays_no_one_and_receives_everything() -> None:
    model, n = FakeModel(), 5000

    async def slow(client: httpx.AsyncClient) -> list[bytes]:
        caller = Caller({**ASK, "max_tokens": n, "stream": True})
        caller.reads.clear()
        call = asyncio.create_task(caller.call(client))
        while model.n_tokens < n or model.running:  # the engine does not wait for the reader
            await asyncio.sleep(0.005)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        caller.reads.set()
        await call
        return caller.got

    got = talk(slow, model)
    text = "".join(json.loads(part[6:])["choices"][0]["text"] for part in got if part.startswith(b"data: {"))
    assert text == ("abc" * n)[:n]
    assert len(got) < 30  # what waited was merged
    assert max(map(len, got)) < 2000  # but not into one piece, which all others would wait for


def test_large_answer_is_serialized_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[bool] = []
    write = openai_text.JSONResponse.render

    def seen(self: Any, content: Any) -> bytes:
        loops.append(threading.current_thread() is threading.main_thread())
        return write(self, content)

    monkeypatch.setattr(openai_text.JSONResponse, "render", seen)
    small = ask("/v1/completions", {**ASK, "logprobs": 2})
    large = ask("/v1/completions", {**ASK, "max_tokens": 1000, "logprobs": 20})
    assert loops == [True, False]
    assert small.json().keys() == large.json().keys()
    assert small.headers["content-type"] == large.headers["content-type"] == "application/json"
    assert len(large.json()["choices"][0]["logprobs"]["tokens"]) == 1000


def test_tokenize_and_detokenize_round_trip() -> None:
    tokens = ask("/v1/tokenize", {"text": "hé"}).json()
    assert tokens["count"] == 3
    assert tokens["tokens"] == [107, 198, 172]
    assert ask("/v1/detokenize", {"tokens": tokens["tokens"]}).json() == {"text": "hé"}
    assert ask("/v1/detokenize", {"tokens": [259]}).status_code == 400


def test_metrics() -> None:
    async def one(client: httpx.AsyncClient) -> str:
        await client.post("/v1/completions", json=ASK)
        await client.get("/some/path")
        return (await client.get("/metrics")).text

    text = talk(one)
    for line in (
        'linnet_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'linnet_http_requests_total{route="other",status="404"} 1.0',
        'linnet_engine_tokens_total{model="fake"} 4.0',
        'linnet_engine_prefix_hits_total{model="fake"} 3.0',
        'linnet_engine_state_bytes{model="fake"} 4096.0',
        'linnet_time_to_first_token_seconds_count{model="fake"} 1.0',
        'linnet_time_between_tokens_seconds_count{model="fake"} 3.0',
        'linnet_completion_tokens_total{model="fake"} 4.0',
        'linnet_ended_total{model="fake",reason="length"} 1.0',
    ):
        assert line in text, text


def test_openapi_document_has_every_route_and_its_references_resolve() -> None:
    document = get("/openapi.json").json()
    reported = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert reported == {(one.method, one.path.replace(":path", "")) for one in ENDPOINTS}
    names = [item["operationId"] for path in document["paths"].values() for item in path.values()]
    assert len(set(names)) == len(names)
    schemas = document["components"]["schemas"]
    for ref in _refs(document):
        assert ref.removeprefix("#/components/schemas/") in schemas, ref
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    assert "top_k" in schemas["ChatRequest"]["properties"]


def _refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for one in value.values() for ref in _refs(one)]
    return [ref for one in value for ref in _refs(one)] if isinstance(value, list) else []
