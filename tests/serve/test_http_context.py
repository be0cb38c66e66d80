"""Bounded contexts over HTTP: prompts that are too long are rejected or truncated. Also requests whose constraints allow nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, ask, talk
from pydantic import ValidationError

from linnet.core.errors import UserError
from linnet.serve.http.schemas import TextRequest
from linnet.serve.request import Sampling

LONG = {"prompt": "abcdefghij", "max_tokens": 4, "seed": 0}


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(part[6:]) for part in response.text.split("\n\n") if part and part != "data: [DONE]"]


def test_too_long_prompt_is_rejected_with_openais_code() -> None:
    for fields in ({}, {"stream": True}, {"truncate_prompt": False}):
        response = ask("/v1/completions", {**LONG, **fields}, FakeModel(context=6))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_truncated_prompt_is_reported() -> None:
    answer = ask("/v1/completions", {**LONG, "truncate_prompt": True}, FakeModel(context=6)).json()
    assert answer["choices"][0]["text"] == "efgh"
    assert (answer["prompt_tokens_cut"], answer["usage"]["prompt_tokens_cut"]) == (4, 4)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (6, 10)
    fits = ask("/v1/completions", {**LONG, "truncate_prompt": True}, FakeModel(context=10)).json()
    assert "prompt_tokens_cut" not in fits
    assert "prompt_tokens_cut" not in fits["usage"]


def test_stream_reports_truncation_in_every_event() -> None:
    requested = {**LONG, "truncate_prompt": True, "stream": True, "stream_options": {"include_usage": True}}
    reported = events(ask("/v1/completions", requested, FakeModel(context=6)))
    assert {one["prompt_tokens_cut"] for one in reported} == {4}
    assert reported[-1]["usage"]["prompt_tokens_cut"] == 4
    chat = {"messages": [{"role": "user", "content": "hello"}], "truncate_prompt": True, "max_tokens": 3}
    n_all = ask("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
    for one in events(ask("/v1/chat/completions", {**chat, "stream": True}, FakeModel(context=6))):
        assert one["prompt_tokens_cut"] == n_all - 6


def test_each_of_several_prompts_is_truncated_once() -> None:
    requested = {**LONG, "prompt": ["abcdefghij", "xyz", "0123456789"], "n": 2, "truncate_prompt": True}
    answer = ask("/v1/completions", requested, FakeModel(context=6)).json()
    assert (answer["prompt_tokens_cut"], answer["usage"]["prompt_tokens"]) == (8, 15)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_returns_the_truncated_prompt(stream: bool) -> None:
    requested = {**LONG, "truncate_prompt": True, "echo": True, "logprobs": 1, "stream": stream}
    response = ask("/v1/completions", requested, FakeModel(context=6))
    choices = [one["choices"][0] for one in (events(response) if stream else [response.json()])]
    assert "".join(one["text"] for one in choices) == "efghijefgh"
    reported = [one["logprobs"] for one in choices if one["logprobs"]]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len([value for one in reported for value in one[field]]) == 10
    assert [offset for one in reported for offset in one["text_offset"]] == list(range(10))


def test_models_endpoint_reports_family_and_context() -> None:
    async def cards(client: httpx.AsyncClient) -> list[Any]:
        return (await client.get("/v1/models")).json()["data"]

    for context in (None, 6):
        (card,) = talk(cards, FakeModel(context=context))
        assert (card["family"], card["context"]) == ("fake", context)


def test_image_larger_than_the_context_is_rejected() -> None:
    for context, status in ((47, 400), (48, 200)):
        model = FakeModel(shape=(4, 4, 3), context=context)
        response = ask("/v1/images/generations", {}, model)
        assert response.status_code == status
        assert len(model.requests) == (status == 200)


def test_grammar_without_a_valid_token_is_a_422() -> None:
    full = ask("/v1/completions", {"prompt": "STUCK", "max_tokens": 4})
    assert full.status_code == 422
    error = full.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    assert "no token is left" in error["message"]
    *_, last = events(ask("/v1/completions", {"prompt": "STUCK", "max_tokens": 4, "stream": True}))
    assert last["error"] == error

    async def document(client: httpx.AsyncClient) -> Any:
        return (await client.get("/openapi.json")).json()

    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "422" in talk(document)["paths"][path]["post"]["responses"]


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_p", "typical_p", "min_p", "seed"])
def test_http_schema_and_engine_have_the_same_bounds(field: str) -> None:
    """The engine accepts every value that the schema accepts, so that /openapi.json shows all bounds."""
    tried = [-1, 0, 1e-45, 1e-7, 1e-6, 0.009, 0.01, 0.5, 1, 2, 99.5, 100, 100.5, 2**32 - 1, 2**32]

    def takes(make: Callable[..., Any], value: float) -> bool:
        try:
            make(**{field: value})
        except (UserError, ValidationError):
            return False
        return True

    for value in [one for one in tried if field != "seed" or isinstance(one, int)]:
        assert takes(TextRequest, value) == takes(Sampling, value), value
