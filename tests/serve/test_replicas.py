"""The front of the replicas: load balancing, full and dead replicas, and one server for clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_model import FakeModel
from fake_replicas import FakeFleet, Harm, fronted
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from linnet.serve.http.lifecycle import Lifecycle
from linnet.serve.http.limits import Limits
from linnet.serve.replicas import upstream
from linnet.serve.request import AnswerLost

ASK = {"prompt": "abc", "max_tokens": 4, "seed": 0}


def talk(
    what: Callable[[httpx.AsyncClient, FakeFleet], Awaitable[Any]], *replicas: FakeModel | Harm, **more: Any
) -> Any:
    async def run() -> Any:
        async with fronted(*replicas, **more) as (client, fleet):
            return await what(client, fleet)

    return asyncio.run(run())


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Behaves like a replica that is killed while computing."""
    await reader.read(100)
    writer.close()


async def dies_in_a_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"9\r\ndata: 1\n\n\r\n")
    await writer.drain()
    writer.close()


async def dies_after_the_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    writer.close()


def test_calls_go_to_the_least_loaded_replica() -> None:
    models = [FakeModel(held=True), FakeModel(held=True)]

    async def four(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        calls = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(4)]
        await eventually(lambda: sum(len(model.requests) for model in models) == 4)
        for model in models:
            model.gate.set()
        answers = await asyncio.gather(*calls)
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["abca"] * 4
        assert [one.n_running for one in fleet.ready] == [0, 0]

    talk(four, *models)
    assert [len(model.requests) for model in models] == [2, 2]


def test_429_only_if_all_replicas_are_full() -> None:
    slow = [FakeModel(held=True, most=1), FakeModel(held=True, most=1)]

    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        first = asyncio.create_task(client.post("/v1/completions", json=ASK))
        while not slow[0].running:
            await asyncio.sleep(0.01)
        fleet.ready[1].n_running = 5  # the front thinks that the first has more room, which it has not
        second = asyncio.create_task(client.post("/v1/completions", json=ASK))
        while not slow[1].running:
            await asyncio.sleep(0.01)
        third = await client.post("/v1/completions", json=ASK)
        assert third.status_code == 429
        assert third.json()["error"]["code"] == "queue_full"
        assert third.headers["retry-after"] == "3"
        for model in slow:
            model.gate.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]

    talk(ask, *slow)


@pytest.mark.parametrize("harm", [hangs_up, dies_after_the_head])
def test_call_without_output_is_retried_on_another_replica(harm: Harm) -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> httpx.Response:
        return await client.post("/v1/completions", json={**ASK, "stream": True})

    answer = talk(ask, harm, FakeModel())
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_retry_keeps_the_request_id() -> None:
    model, names = FakeModel(), []
    acquire = model.store.acquire

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        names.extend(line[14:].decode() for line in head.split(b"\r\n") if line.startswith(b"x-request-id: "))
        writer.close()

    def record_call(id: str, call: str) -> None:
        names.append(call)
        acquire(id, call)
        raise AnswerLost(id)

    model.store.acquire = record_call  # type: ignore[method-assign]

    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> httpx.Response:
        return await client.post("/v1/completions", json={**ASK, "session": model.store.create()})

    answer = talk(ask, dies, model)
    assert names == [answer.headers["x-request-id"]] * 2
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "answer_lost")
    assert answer.headers["x-should-retry"] == "false"


def test_call_that_kills_replicas_is_tried_at_most_twice() -> None:
    model = FakeModel()

    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> httpx.Response:
        fleet.ready[2].n_calls = 1
        return await client.post("/v1/completions", json=ASK)

    answer = talk(ask, hangs_up, hangs_up, model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert answer.headers["x-should-retry"] == "false"
    assert not model.requests


def test_interrupted_stream_ends_with_an_error_event() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> httpx.Response:
        return await client.post("/v1/completions", json={**ASK, "stream": True})

    answer = talk(ask, dies_in_a_stream, FakeModel())
    first, last, _ = answer.text.split("\n\n")
    assert first == "data: 1"
    assert json.loads(last[6:])["error"]["code"] == "replica_lost"


def test_front_without_replicas_returns_503() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        assert (await client.get("/ready")).json() == {"status": "ready"}
        fleet.replicas = [None]
        none = await client.post("/v1/completions", json=ASK)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in none.headers
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "starting"})
        assert (await client.get("/health")).status_code == 200

    talk(ask, FakeModel())


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels_on_the_replica(stream: bool) -> None:
    model = FakeModel(held=True)

    async def leave(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        app = client._transport.app  # type: ignore[attr-defined]
        body = json.dumps({**ASK, "max_tokens": 2000, "stream": stream}).encode()
        incoming: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            pass

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
        }
        call = asyncio.create_task(app(scope, receive, send))
        while not model.running:
            await asyncio.sleep(0.01)
        gone.set()
        await call
        await eventually(lambda: not model.running)
        assert fleet.ready[0].n_running == 0

    talk(leave, model)
    assert model.cancelled == {model.requests[0].id}


def test_front_checks_keys_hosts_and_limits() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 401
        known = {"authorization": "Bearer a-secret-key"}
        calls = [asyncio.create_task(client.post("/v1/completions", json=ASK, headers=known)) for _ in range(3)]
        await asyncio.wait(
            calls, return_when=asyncio.FIRST_COMPLETED
        )  # the one that is rejected: the models hold the others
        for model in slow:
            model.gate.set()
        statuses = sorted(answer.status_code for answer in await asyncio.gather(*calls))
        assert statuses == [200, 200, 429], "calls of one key over both replicas"
        large = await client.post("/v1/tokenize", json={"text": "x" * 5000}, headers=known)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")

    limits = Limits(calls_per_key=2, body_bytes=2000)
    slow = [FakeModel(held=True), FakeModel(held=True)]
    talk(ask, *slow, keys=("a-secret-key",), limits=limits, state_bytes=3)

    async def foreign(client: httpx.AsyncClient, fleet: FakeFleet) -> httpx.Response:
        return await client.get("/v1/models", headers={"host": "evil.example"})

    assert talk(foreign, FakeModel()).status_code == 403


def test_front_and_replica_share_the_request_id() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        failed = await client.post("/v1/completions", json={**ASK, "prompt": "BOOM"})
        assert failed.status_code == 500
        assert failed.headers["x-request-id"] in failed.json()["error"]["message"]
        forged = await client.get("/v1/models", headers={"x-request-id": "mine"})
        assert forged.headers["x-request-id"].startswith("req_")

    talk(ask, FakeModel())


def test_every_route_behaves_as_without_a_front() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        made = (await client.post("/v1/sessions", json={})).json()["id"]
        assert (await client.get(f"/v1/sessions/{made}")).json()["n_tokens"] == 0
        assert (await client.post("/v1/sessions/restore?model=no", content=b"x")).status_code == 404
        assert (await client.delete(f"/v1/sessions/{made}")).json()["deleted"]
        assert (await client.get(f"/v1/sessions/{made}")).json()["error"]["code"] == "session_not_found"
        assert (await client.get("/v1/models/fake")).json()["id"] == "fake"
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.put("/v1/models")).status_code == 405
        assert "/v1/completions" in (await client.get("/openapi.json")).json()["paths"]
        assert "<html" in (await client.get("/")).text

    talk(ask, FakeModel())


def test_metrics_have_a_replica_label_and_shared_values_once() -> None:
    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> str:
        for _ in range(2):
            await client.post("/v1/completions", json=ASK)
        fleet.n_restarts = 7
        return (await client.get("/metrics")).text

    text = talk(ask, FakeModel(), FakeModel())
    found = {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [found["linnet_completion_tokens_total", number] for number in "01"] == [4, 4]
    assert found["linnet_replicas_ready", None] == 2
    assert found["linnet_replica_restarts_total", None] == 7
    assert found["linnet_http_requests_total", None] == 2
    assert not [key for key in found if key[0].startswith("linnet_http") and key[1]]
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "one group for each name, as the format asks"


def test_drain_rejects_new_work_and_ends_late_requests_with_an_error() -> None:
    lifecycle, model = Lifecycle(), FakeModel(seconds_per_token=0.02)

    async def ask(client: httpx.AsyncClient, fleet: FakeFleet) -> None:
        requested = {**ASK, "max_tokens": 1000}
        late = [
            asyncio.create_task(client.post("/v1/completions", json={**requested, "stream": s})) for s in (False, True)
        ]
        while len(model.running) < 2 or model.n_tokens < 4:
            await asyncio.sleep(0.01)
        lifecycle.drain()
        assert (await client.get("/ready")).json() == {"status": "draining"}
        rejection = await client.post("/v1/completions", json=ASK)
        assert (rejection.status_code, rejection.json()["error"]["code"]) == (503, "draining")
        assert (await client.get("/v1/models")).status_code == 200
        lifecycle.close_responses()
        full, stream = [await one for one in late]
        assert (full.status_code, full.json()["error"]["code"]) == (503, "cancelled")
        assert json.loads(stream.text.strip().split("\n\n")[-1][6:])["error"]["code"] == "cancelled"

    talk(ask, model, lifecycle=lifecycle)


def test_metrics_do_not_wait_for_a_hung_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "GET_SECONDS", 0.3)

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the front hangs up
        writer.close()

    async def read(client: httpx.AsyncClient, fleet: FakeFleet) -> str:
        return (await client.get("/metrics")).text

    text = talk(read, never, FakeModel())
    assert "linnet_replicas_ready 2.0" in text
    assert 'replica="1"' in text
