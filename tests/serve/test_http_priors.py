"""/v1/priors/sample: texts and embeddings, candidates, progress events, and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import FakeModel, talk
from fake_prior import DOT, FakePrior, ask_prior

from linnet.models.prior.sampling import best
from linnet.serve.http.limits import Limits
from linnet.serve.http.priors import best_candidate

SAMPLE = "/v1/priors/sample"


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.strip().split("\n\n")
    return [json.loads(part.rpartition("data: ")[2]) for part in parts]


def test_best_candidate_has_the_highest_cosine_to_the_text() -> None:
    model = FakePrior()
    answer = ask_prior(
        {"input": ["red", "blue sky"], "n": 4, "seed": 0, "steps": 9, "guidance": 2.5, "solver": "ddim", "eta": 0.5},
        model,
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"], body["steps"]) == ("prior.sample", "prior", 9)
    assert [one["index"] for one in body["data"]] == [0, 1]
    for one, text in zip(body["data"], model.embed(["red", "blue sky"]), strict=True):
        assert [candidate["seed"] for candidate in one["candidates"]] == [0, 1, 2, 3]
        assert (one["best"], one["seed"]) == (2, 2)
        assert one["embedding"] == one["candidates"][2]["embedding"] == text.tolist()
        assert one["cosine"] == pytest.approx(1.0)
        assert one["cosine"] == max(candidate["cosine"] for candidate in one["candidates"])
        assert one["nearest"] is None
    request = model.requests[5]
    assert (request.seed, request.steps, request.guidance, request.solver, request.eta) == (1, 9, 2.5, "ddim", 0.5)
    assert request.n_progress == 0


def test_best_candidate_matches_the_model_familys_choice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        candidates, text = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
        by_family = best(jnp.asarray(candidates)[None], jnp.asarray(text)[None])[0]
        np.testing.assert_array_equal(candidates[best_candidate(list(candidates), text)], by_family)
    same = np.ones(3, np.float32)
    assert best_candidate([same, same], same) == 0
    assert best_candidate([same, same], np.ones(5, np.float32)) == 0


def test_embeddings_are_used_unchanged_and_round_trip_exactly() -> None:
    model = FakePrior(max_encodings=3)
    vector = np.random.default_rng(1).standard_normal(26).astype(np.float32)
    rows = [[0.5] * 26, [0.25] * 26]
    answer = ask_prior({"embeddings": vector.tolist(), "encodings": rows, "seed": 2}, model).json()
    np.testing.assert_array_equal(model.requests[0].text, vector)
    np.testing.assert_array_equal(model.requests[0].encodings, np.asarray(rows, np.float32))
    np.testing.assert_array_equal(np.asarray(answer["data"][0]["embedding"], np.float32), vector)
    several = {"embeddings": [vector.tolist()] * 2, "text_encodings": [rows, rows[:1]]}
    assert len(ask_prior(several, model).json()["data"]) == 2
    assert [len(one.encodings) for one in model.requests[1:] if one.encodings is not None] == [2, 1]
    # Those of words are computed.
    assert ask_prior({"input": ["red", "blue"]}, model).status_code == 200
    assert [one.encodings.tolist() for one in model.requests[3:] if one.encodings is not None] == [[[1.0] * 26] * 2] * 2


def test_nearest_images_have_captions_and_cosines() -> None:
    near = ask_prior({"input": "green", "seed": 2, "nearest": 2}).json()["data"][0]["nearest"]
    assert [one["caption"] for one in near] == ["green", "red"]
    assert near[0]["cosine"] == pytest.approx(1.0)
    assert near[0]["cosine"] > near[1]["cosine"]
    assert near[0]["b64_json"] == DOT


def test_stream_sends_progress_per_candidate_then_the_result() -> None:
    body = {"input": "white", "n": 2, "seed": 2, "steps": 20, "nearest": 3, "stream": True, "progress": 4}
    model = FakePrior(paced=True)  # progress that the reader has not taken yet would be replaced by newer progress
    assert model.pace is not None
    *reported, last = events(talk(partial(_read, body, on_progress=model.pace.release), model))
    assert {(one["candidate"], one["step"]) for one in reported} == {
        (i, step) for i in (0, 1) for step in (4, 8, 12, 16)
    }
    assert {one["type"] for one in reported} == {"prior.progress"}
    assert {(one["index"], one["steps"]) for one in reported} == {(0, 20)}
    assert all(len(one["nearest"]) == 3 for one in reported)
    assert reported[-1]["cosine"] > reported[0]["cosine"]
    assert last["type"] == "prior.completed"
    complete = ask_prior({name: value for name, value in body.items() if name not in ("stream", "progress")}).json()
    assert last["data"] == complete["data"]
    silent = events(ask_prior({**body, "progress": 0}))
    assert [one["type"] for one in silent] == ["prior.completed"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": "a", "embeddings": [1.0] * 26}, "input"),
        ({"embeddings": [1.0] * 25}, "width"),
        ({"embeddings": [[1.0] * 26, [1.0]]}, "width"),
        ({"embeddings": [1e300] * 26}, "embedding"),
        ({"embeddings": []}, "embeddings"),
        ({"input": ""}, "input"),
        ({"input": "a", "text_encodings": [[1.0] * 26]}, "text_encodings"),
        ({"embeddings": [1.0] * 26, "text_encodings": [[[1.0] * 26]] * 2}, "text_encodings"),
        ({"embeddings": [1.0] * 26, "text_encodings": [[1.0] * 7]}, "text_encodings"),
        ({"embeddings": [1.0] * 26, "text_encodings": []}, "text_encodings"),
        ({"embeddings": [1.0] * 26, "text_encodings": [[1.0] * 26] * 1025}, "text_encodings"),
        ({"embeddings": [1.0] * 26, "text_encodings": [[1.0] * 26], "encodings": [[1.0] * 26]}, "encodings"),
        ({"input": "a", "n": 0}, "n"),
        ({"input": ["a"] * 9, "n": 4}, "answers"),
        ({"input": "a", "steps": 1}, "steps"),
        ({"input": "a", "solver": "euler"}, "solver"),
        ({"input": "a", "eta": 1.5, "solver": "ddim"}, "eta"),
        ({"input": "a", "eta": 0.5}, "eta"),
        ({"input": "a", "guidance": -1}, "guidance"),
        ({"input": "a", "progress": 3}, "progress"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "deadline_seconds": 1e9}, "deadline_seconds"),
    ],
)
def test_invalid_requests_are_rejected_with_a_message(body: dict[str, Any], field: str) -> None:
    model = FakePrior()
    answer = ask_prior(body, model)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]
    assert "Fix:" in answer.json()["error"]["message"]
    assert not model.requests


def test_unsupported_prior_features_are_rejected() -> None:
    assert "encoder" in ask_prior({"input": "a"}, FakePrior(takes_text=False)).json()["error"]["message"]
    assert "gallery" in ask_prior({"input": "a", "nearest": 1}, FakePrior(has_gallery=False)).json()["error"]["message"]
    gone = ask_prior({"input": "a", "seed": 13})
    assert (gone.status_code, gone.json()["error"]["code"]) == (422, "not_finite")
    other = ask_prior({"input": "a", "n": 2}, FakePrior(width=5)).json()["data"][0]
    assert (other["cosine"], other["best"], len(other["embedding"])) == (None, 0, 5)


def test_token_models_and_priors_are_served_together() -> None:
    async def both(client: httpx.AsyncClient) -> None:
        cards = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert cards["prior"]["family"] == "prior"
        assert [cards["prior"][name] for name in ("width", "text_width", "timesteps")] == [26, 26, 100]
        assert [cards["prior"][name] for name in ("takes_text", "max_encodings", "gallery")] == [True, 0, 4]
        assert (await client.get("/v1/models/prior")).json() == cards["prior"]
        assert cards["fake"]["n_vocab"] > 0
        # Without a name: the first that can do it.
        assert (await client.post(SAMPLE, json={"input": "a"})).json()["model"] == "prior"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).json()["model"] == "fake"
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/tokenize", {"text": "a"}),
            ("/v1/images/generations", {}),
            ("/v1/sessions", {}),
        ):
            answer = await client.post(path, json={**body, "model": "prior"})
            assert answer.status_code == 400
            assert "/v1/priors/sample" in answer.json()["error"]["message"]
        wrong = await client.post(SAMPLE, json={"input": "a", "model": "fake"})
        assert wrong.status_code == 400
        assert "a prior" in wrong.json()["error"]["message"]
        assert (await client.post(SAMPLE, json={"input": "a", "model": "none"})).status_code == 404
        assert (await client.get("/v1/sessions/none")).status_code == 404
        metrics = (await client.get("/metrics")).text
        assert 'linnet_sample_seconds_count{model="prior"} 1.0' in metrics
        assert 'linnet_engine_steps_total{model="prior"} 7.0' in metrics
        assert 'linnet_ended_total{model="prior",reason="stop"} 1.0' in metrics
        document = (await client.get("/openapi.json")).json()
        assert "PriorRequest" in document["components"]["schemas"]
        assert "post" in document["paths"][SAMPLE]

    talk(both, FakePrior(), FakeModel())


def test_server_with_only_priors_rejects_text_requests() -> None:
    async def text(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json={"prompt": "a"})

    answer = talk(text, FakePrior())
    assert (answer.status_code, "prior" in answer.json()["error"]["message"]) == (400, True)


def test_full_queue_is_429_and_deadline_is_504() -> None:
    full = ask_prior({"input": "a", "n": 2}, FakePrior(most=1, paused=True))
    assert (full.status_code, full.headers["retry-after"]) == (429, "3")
    late = ask_prior({"input": "a", "deadline_seconds": 0.05}, FakePrior(paused=True))
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    few = ask_prior({"input": ["a", "b"]}, limits=Limits(answers=1))
    assert few.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_cancels_its_samples(stream: bool) -> None:
    model = FakePrior(paused=True)

    async def leave(client: httpx.AsyncClient) -> None:
        body = {"input": "a", "n": 2, "steps": 100, "stream": stream}
        call = asyncio.create_task(_call(client, body, gone := asyncio.Event()))
        while len(model.requests) < 2:
            await asyncio.sleep(0.005)
        gone.set()
        await call
        while model.running:
            await asyncio.sleep(0.005)

    talk(leave, model)
    assert model.cancelled == {request.id for request in model.requests}


async def _read(body: dict[str, Any], client: httpx.AsyncClient, on_progress: Callable[[], None]) -> httpx.Response:
    """Return the complete stream; `on_progress` is called for each progress event."""
    got = b""

    async def take(message: dict[str, Any]) -> None:
        nonlocal got
        got += message.get("body", b"")
        for _ in range(message.get("body", b"").count(b'"prior.progress"')):
            on_progress()

    await _call(client, body, asyncio.Event(), take)
    return httpx.Response(200, content=got, headers={"content-type": "text/event-stream"})


async def _drop(message: dict[str, Any]) -> None:
    del message


async def _call(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    gone: asyncio.Event,
    send: Callable[[dict[str, Any]], Awaitable[None]] = _drop,
) -> None:
    """The ASGI scope of a call, as a server creates it."""
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": SAMPLE,
        "raw_path": SAMPLE.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }
    await client._transport.app(scope, receive, send)  # type: ignore[attr-defined]
