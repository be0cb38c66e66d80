"""The clients without a server: retries, errors, streams that break off, and arguments that are checked before a request is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import linnet
from linnet.api import async_client, client_http
from linnet.api import client as sync_client
from linnet.api.client_http import EventDecoder, HttpResponse, retry_wait

URL = "http://127.0.0.1:1"
MODELS = {"object": "list", "data": [{"id": "m", "family": "vq", "end_id": 0}]}
CHOICE = {"index": 0, "text": "a", "token_ids": [7], "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0]}}
ANSWER = {"model": "m", "choices": [CHOICE], "usage": {"total_tokens": 2}}
Handler = Callable[[httpx.Request], httpx.Response]


def problem(status: int, code: str = "queue_full", **headers: str) -> httpx.Response:
    error = {"message": "the queue is full. Fix: wait.", "code": code, "param": None}
    return httpx.Response(status, json={"error": error}, headers={"x-request-id": "r1", **headers})


class Server:
    """Answers with the given responses in turn, the last one again and again."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self.responses, self.bodies = list(responses), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        self.bodies.append(json.loads(request.content or b"null"))
        found = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clients waited, without waiting."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(sync_client.time, "sleep", found.append)
    monkeypatch.setattr(async_client.asyncio, "sleep", sleep)
    return found


def make_client(handler: Handler, **settings: Any) -> linnet.Client:
    client = linnet.Client(URL, **settings)
    client._http = httpx.Client(base_url=URL, transport=httpx.MockTransport(handler))
    return client


def generate(kind: str, handler: Handler, **settings: Any) -> linnet.GeneratedText:
    """Generate with one of the clients, complete or streamed."""
    if not kind.startswith("async"):
        client = make_client(handler, **settings)
        if kind == "stream":
            return linnet.GeneratedText.from_pieces(client.generate("x", stream=True))
        return client.generate("x")

    async def main() -> linnet.GeneratedText:
        client = linnet.AsyncClient(URL, **settings)
        client._http = httpx.AsyncClient(base_url=URL, transport=httpx.MockTransport(handler))
        if kind == "async stream":
            pieces = [piece async for piece in client.generate("x", stream=True)]
            return linnet.GeneratedText.from_pieces(pieces)
        return await client.generate("x")

    return asyncio.run(main())


KINDS = ("whole", "stream", "async", "async stream")


def events(*data: Any) -> httpx.Response:
    lines = [f"data: {one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}\n\n" for one in data]
    return httpx.Response(200, content="".join(lines).encode())


def success(kind: str) -> httpx.Response:
    ended = {**CHOICE, "text": "", "token_ids": [], "logprobs": None}
    began = {**CHOICE, "finish_reason": None}
    usage = {"model": "m", "choices": [], "usage": ANSWER["usage"]}
    if "stream" in kind:
        return events({**ANSWER, "choices": [began], "usage": None}, {**ANSWER, "choices": [ended]}, usage, "[DONE]")
    return httpx.Response(200, json=ANSWER)


@pytest.mark.parametrize("kind", KINDS)
def test_overloaded_server_is_retried_after_its_retry_after(kind: str, waits: list[float]) -> None:
    server = Server(problem(429, **{"retry-after": "7"}), problem(503), success(kind))
    text = generate(kind, server)
    assert (text, text.token_ids, text.logprobs, text.finish_reason) == ("a", (7,), (-1.0,), "length")
    assert waits == [7.0, 1.0]
    assert server.bodies[0] == server.bodies[2]
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["top_p"], server.bodies[0]["seed"]) == (512, 0.9, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_retries_are_bounded(kind: str, waits: list[float]) -> None:
    server = Server(problem(429, **{"retry-after": "900"}))
    with pytest.raises(
        linnet.ServerError, match=r"the queue is full\. Fix: wait\. \(status 429, request id r1\)"
    ) as caught:
        generate(kind, server, retries=2)
    assert (caught.value.code, caught.value.request_id) == ("queue_full", "r1")
    assert waits == [client_http.MAX_WAIT] * 2
    assert len(server.bodies) == 3


@pytest.mark.parametrize("response", [problem(500), problem(503, "answer_lost", **{"x-should-retry": "false"})])
def test_other_errors_are_not_retried(response: httpx.Response, waits: list[float]) -> None:
    server = Server(response)
    with pytest.raises(linnet.ServerError):
        generate("whole", server)
    assert (len(server.bodies), waits) == (1, [])


def test_waits_without_a_suggestion_double() -> None:
    response = HttpResponse(status=503, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert [retry_wait(response, attempt) for attempt in (0, 1, 2, 9)] == [0.5, 1.0, 2.0, 30.0]
    assert retry_wait(HttpResponse(status=503, headers={"retry-after": "-1"}), 0) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            httpx.ConnectError("refused"),
            r"no server answers at http://127.0.0.1:1 \(refused\). Fix: .*linnet serve RUN",
        ),
        (httpx.ReadTimeout(""), "did not answer within 600 s. Fix: raise `timeout`"),
        (httpx.RemoteProtocolError("peer closed"), r"before the answer was complete \(peer closed\)"),
        (httpx.ReadError(""), r"before the answer was complete \(ReadError\)"),
    ],
)
def test_connection_errors(kind: str, error: Exception, message: str) -> None:
    with pytest.raises(linnet.ServerConnectionError, match=message) as caught:
        generate(kind, Server(error))
    assert isinstance(caught.value, linnet.LinnetError)


@pytest.mark.parametrize("kind", ["stream", "async stream"])
def test_error_in_a_stream_is_raised(kind: str) -> None:
    began = {**ANSWER, "choices": [{**CHOICE, "finish_reason": None}], "usage": None}
    error = {"error": {"message": "the deadline passed", "code": "deadline", "param": "deadline_seconds"}}
    with pytest.raises(linnet.ServerError, match="^the deadline passed$") as caught:
        generate(kind, Server(events(began, error)))
    assert (caught.value.status, caught.value.code, caught.value.param) == (None, "deadline", "deadline_seconds")
    with pytest.raises(linnet.ServerConnectionError, match="the stream has no end"):
        generate(kind, Server(events(began)))


def test_other_programs_at_the_address() -> None:
    with pytest.raises(linnet.ServerError, match="not a Linnet server"):
        make_client(lambda _: httpx.Response(200, text="<html>")).health()
    with pytest.raises(linnet.ServerError, match=r"^<html>gone \(status 404\)$"):
        make_client(lambda _: httpx.Response(404, text="<html>gone")).models()


def test_events_may_be_split_anywhere_and_contain_any_character() -> None:
    """U+2028 and U+0085 are line ends for `str.splitlines`, but not in a stream."""
    text = "a\u2028b\u0085c\u00fc"
    data = f"event: x\ndata: {json.dumps({'text': text}, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
    decoder = EventDecoder()
    found = [event for i in range(len(data)) for event in decoder.feed(data[i : i + 1])]
    assert found == [{"text": text}]
    assert decoder.is_done


def test_arguments_are_checked_before_a_request_is_sent(tmp_path: Path) -> None:
    server = Server(httpx.Response(500))
    client: Any = make_client(server)  # some arguments are of a wrong type on purpose
    for call, message in (
        (lambda: client.generate([]), "at least one prompt"),
        (lambda: client.generate(7), "texts, or arrays of token ids"),
        (lambda: client.generate("\ud800"), "lone surrogates"),
        (lambda: client.generate("x", seed=-1), "seed"),
        (lambda: client.generate(["x", "y"], seed=[1]), "one for each of the 2 prompts"),
        (lambda: next(client.generate(["x", "y"], seed=[1, 2], stream=True)), "one number in a stream"),
        (lambda: client.encode(b"x"), "a str"),
        (lambda: client.generate_images(0), "at least 1"),
        (lambda: client.sample("x", n=33), "1 to 32"),
        (lambda: client.sample("x", embeddings=np.zeros(4, np.float32)), "one of the two"),
        (lambda: client.session(tmp_path / "missing"), "session file that can be read"),
        (lambda: linnet.Client("localhost:8000"), "an address with http://"),
        (lambda: linnet.Client(api_key="a\nb"), "printable ASCII"),
        (lambda: linnet.Client(retries=-1), "0 or more"),
    ):
        with pytest.raises(linnet.UserError, match=message):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'echo'"):
        client.generate("x", echo=True)  # pyright: ignore[reportCallIssue]
    assert server.bodies == []
    assert linnet.Client(URL + "/v1/").url == URL
