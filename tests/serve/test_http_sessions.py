"""Sessions, client-held states, and images, with a fake engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from fake_model import FakeModel, ask, talk
from PIL import Image
from playground_server import DrawingModel, serving
from waiting import PATIENCE

from linnet.core.errors import UserError
from linnet.serve.http.limits import Limits
from linnet.serve.sessions import MemorySessions
from linnet.serve.state import State

ASK = {"prompt": "abc", "max_tokens": 4, "seed": 0}
UNDRAWN = 208


def test_session_lifecycle() -> None:
    model = FakeModel()

    async def live(client: httpx.AsyncClient) -> None:
        made = (await client.post("/v1/sessions", json={})).json()
        assert made == {"id": "session-0", "object": "session", "model": "fake", "n_tokens": 0, "state_bytes": 4096}
        path = "/v1/sessions/session-0"
        first = await client.post("/v1/completions", json={**ASK, "session": "session-0"})
        assert first.json()["choices"][0]["text"] == "abca"
        fork = (await client.post(f"{path}/fork")).json()["id"]
        await client.post("/v1/completions", json={**ASK, "prompt": "xyz", "session": "session-0"})
        assert (await client.get(path)).json()["n_tokens"] == 14
        assert (await client.get(f"/v1/sessions/{fork}")).json()["n_tokens"] == 7
        saved = await client.get(f"{path}/state")
        headers = {"content-type": "application/octet-stream"}
        back = await client.post("/v1/sessions/restore?model=fake", content=saved.content, headers=headers)
        assert back.json()["n_tokens"] == 14
        assert model.store.get(back.json()["id"]) == model.store.get("session-0")
        broken = await client.post("/v1/sessions/restore", content=saved.content[:9], headers=headers)
        assert broken.status_code == 400
        assert (await client.delete(path)).json() == {"id": "session-0", "object": "session", "deleted": True}
        assert (await client.get(path)).status_code == 404
        missing = await client.post("/v1/completions", json={**ASK, "session": "session-0"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")

    talk(live, model)


def test_body_limit_is_raised_for_states() -> None:
    limits = Limits(body_bytes=1000)
    state = ask("/v1/completions", {**ASK, "prompt": "x" * 300, "return_state": True}, limits=limits).json()["state"]
    assert len(state) > limits.body_bytes
    for path, more in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert ask(path, {"state": state, "max_tokens": 1, **more}, limits=limits).status_code == 200
    assert ask("/v1/tokenize", {"text": state}, limits=limits).status_code == 413


def test_session_allows_one_call_at_a_time() -> None:
    async def two(client: httpx.AsyncClient) -> list[int]:
        await client.post("/v1/sessions", json={})
        body = {**ASK, "session": "session-0"}
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        await asyncio.wait(
            calls, return_when=asyncio.FIRST_COMPLETED
        )  # the one that is rejected: the model holds the other
        model.gate.set()
        return sorted(response.status_code for response in await asyncio.gather(*calls))

    model = FakeModel(held=True)
    assert talk(two, model) == [200, 409]


@pytest.mark.parametrize("stream", [False, True])
def test_client_held_state(stream: bool) -> None:
    model = FakeModel()

    async def go_on(client: httpx.AsyncClient) -> None:
        first = await client.post("/v1/completions", json={**ASK, "return_state": True, "stream": stream})
        if stream:
            (state,) = [json.loads(line[6:])["state"] for line in first.text.split("\n\n") if '"state"' in line]
        else:
            state = first.json()["state"]
        await client.post("/v1/completions", json={**ASK, "state": state})
        assert bytes(token - 3 for token in model.requests[1].state) == b"abcabca"
        assert model.store.all == {}

    talk(go_on, model)


def test_client_held_state_does_not_count_as_a_session() -> None:
    model = FakeModel()
    model.store.most = 1

    async def go_on(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/sessions", json={})).status_code == 200
        assert (await client.post("/v1/sessions", json={})).status_code == 400
        first = await client.post("/v1/completions", json={**ASK, "return_state": True})
        second = await client.post(
            "/v1/completions", json={**ASK, "state": first.json()["state"], "return_state": True}
        )
        assert bytes(token - 3 for token in model.requests[1].state) == b"abcabca"
        third = await client.post("/v1/completions", json={**ASK, "state": second.json()["state"]})
        assert third.status_code == 200
        assert list(model.store.all) == ["session-0"]

    talk(go_on, model)


def test_states_can_be_packed_when_sessions_are_full() -> None:
    like = {"memory": np.zeros(3, np.float32)}
    sessions = MemorySessions(lambda n: like, "f" * 64, max_sessions=1)
    state = State(memory={"memory": np.arange(3, dtype=np.float32)}, last=5, n_tokens=9, model="f" * 64)
    sessions.put(sessions.create(), state, 8)
    back = sessions.unpack(sessions.pack(state))
    assert (back.n_tokens, back.state and back.state.last) == (8, 5)
    assert len(sessions) == 1
    with pytest.raises(UserError, match="maximum number of sessions"):
        sessions.restore(sessions.pack(state))


def test_full_session_memory_rejects_new_sessions_only() -> None:
    shared, sizes = np.zeros(10, np.float32), (10, 20)

    def state(n: int) -> State:
        return State(memory=(shared, np.zeros(n, np.float32)), last=5, n_tokens=9, model="f" * 64)

    sessions = MemorySessions(lambda n: None, "f" * 64, max_bytes=4 * 30)
    first, second = sessions.create(), sessions.create()
    sessions.put(first, state(sizes[0]), 8)
    assert sessions.n_bytes == 4 * 20
    forked = sessions.fork(first)
    assert sessions.n_bytes == 4 * 20, "a state that two have counts once"
    sessions.put(second, state(sizes[1]), 8)
    assert sessions.n_bytes == 4 * 40, "one that is there continues"
    for more in (sessions.create, lambda: sessions.fork(first)):
        with pytest.raises(UserError, match="memory for session states is full"):
            more()
    sessions.delete(second)
    sessions.delete(first)
    assert sessions.n_bytes == 4 * 20
    sessions.put(forked, state(sizes[1]), 9)
    assert sessions.n_bytes == 4 * 30
    sessions.delete(forked)
    assert sessions.n_bytes == 0
    assert sessions.create()


def test_chat_session_continues_on_a_new_line() -> None:
    model = FakeModel()
    model.sessions.put(model.sessions.create(), [100], 1)
    ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "b"}], "session": "session-0"}, model)
    assert model.tokenizer.decode(model.requests[0].prompt) == b"\nuser: b\nassistant:"


def test_images() -> None:
    model = FakeModel(shape=(2, 4, 3))
    answer = ask("/v1/images/generations", {"n": 2, "size": "4x2", "seed": 5}, model).json()
    assert len(answer["data"]) == 2
    assert model.requests[0].sampling.allowed == frozenset(range(3, 259))
    with Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as image:
        assert np.asarray(image).shape == (2, 4, 3)
        assert not np.asarray(image).any()  # the fake's only token is byte 0
    assert ask("/v1/images/generations", {"prompt": "a cat"}, model).status_code == 400
    assert ask("/v1/images/generations", {"size": "9x9"}, model).status_code == 400
    assert ask("/v1/images/generations", {}).status_code == 400


def _drawn_in_parts(partial_images: int) -> tuple[list[tuple[int, Any]], str]:
    """Return (index, pixels) of each partial 4 x 4 image, and the name of the last event."""
    model = DrawingModel(shape=(4, 4, 3))
    model.pace = threading.Semaphore(0)
    partial, name = [], ""
    body = {"stream": True, "partial_images": partial_images}
    with (
        serving(model) as address,
        httpx.stream("POST", f"{address}/v1/images/generations", json=body, timeout=PATIENCE) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "image_generation.partial_image":
                one = json.loads(line.removeprefix("data: "))
                with Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) as image:
                    partial.append((one["partial_image_index"], np.asarray(image).reshape(-1)))
                model.pace.release()
    return partial, name


def test_partial_image_index_counts_merged_images() -> None:
    """Rows of 12 values arrive together, so every third of the 11 requested images is sent."""
    partial, _ = _drawn_in_parts(11)
    assert [index for index, _ in partial] == [2, 5, 8]  # 0-based, of 11 at even distances
    assert [int((pixels != UNDRAWN).sum()) for _, pixels in partial] == [12, 24, 36]


def test_partial_images_are_streamed() -> None:
    partial, last = _drawn_in_parts(3)
    assert last == "image_generation.completed"
    assert [index for index, _ in partial] == [0, 1, 2]
    assert all((pixels[0], pixels[-1]) == (0, UNDRAWN) for _, pixels in partial)
