"""Completions and chat with a fake engine: OpenAI's format field by field, complete and streamed, and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, ask, talk

from linnet.serve.http.results import merge
from linnet.serve.request import PrefillDone, TokenLogprob, TokensEvent


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    return [json.loads(part[6:]) if part != "data: [DONE]" else "DONE" for part in parts[:-1]]


def test_completion_has_openais_format() -> None:
    answer = ask("/v1/completions", {"model": "fake", "prompt": "abc", "max_tokens": 5, "seed": 0}).json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "system_fingerprint": "fp_fake",
        "choices": [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_prompt_accepts_texts_and_ids() -> None:
    for prompt, texts in (
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([100, 101], ["ab"]),
        ([[100], [101]], ["aa", "bb"]),
    ):
        answer = ask("/v1/completions", {"prompt": prompt, "max_tokens": 2, "seed": 0}).json()
        assert [choice["text"] for choice in answer["choices"]] == texts


def test_seeds_of_a_prompts_answers_do_not_depend_on_other_prompts() -> None:
    alone = ask("/v1/completions", {"prompt": "xyz", "n": 2, "max_tokens": 3, "seed": 4}).json()["choices"]
    beside = ask("/v1/completions", {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "seed": 4}).json()["choices"]
    assert [one["text"] for one in alone] == ["yzx", "zxy"]
    assert [one["text"] for one in beside[2:]] == ["yzx", "zxy"]
    assert [one["index"] for one in beside] == [0, 1, 2, 3]


def test_best_of_returns_the_most_likely_answers() -> None:
    answer = ask("/v1/completions", {"prompt": "wxyz", "n": 1, "best_of": 3, "max_tokens": 3, "seed": 2**32 - 1}).json()
    assert answer["choices"][0]["text"] == "wxy"  # the seed wraps to 0, whose log-probability is highest
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens"] == 4


def test_logprobs_and_echo() -> None:
    body = {"prompt": "aé", "max_tokens": 2, "seed": 0, "logprobs": 1, "echo": True}
    choice = ask("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "aéa\ufffd"
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"],
        "token_logprobs": [None, -0.5, -0.5, -1.0, -1.0],
        "top_logprobs": [None, *[{"\x00": -9999.0}] * 4],  # nothing could have stood in the place of the first
        "text_offset": [0, 1, 1, 2, 3],
        "top_token_ids": [None, *[[3]] * 4],
    }


def test_scoring_returns_only_the_prompt() -> None:
    body = {"prompt": "abc", "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = ask("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_streamed_completion_equals_the_complete_one() -> None:
    body = {"prompt": ["añb", "cd"], "n": 2, "max_tokens": 9, "seed": 0, "logprobs": 2, "echo": True}
    full = ask("/v1/completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(ask("/v1/completions", {**body, **options}))
    assert done == "DONE"
    assert last["choices"] == []
    assert last["usage"] == full["usage"]
    assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
    for choice in full["choices"]:
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine][-1] == choice["finish_reason"]
        for field in choice["logprobs"]:
            reported = [value for one in mine if one["logprobs"] for value in one["logprobs"][field]]
            assert reported == choice["logprobs"][field]


def test_chat_completion() -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    model = FakeModel()
    body = {"messages": messages, "max_completion_tokens": 6, "seed": 0, "logprobs": True, "top_logprobs": 1}
    answer = ask("/v1/chat/completions", body, model).json()
    assert model.tokenizer.decode(model.requests[0].prompt) == b"system: be\nuser: hi\nassistant:"
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "system", "refusal": None}
    assert choice["finish_reason"] == "length"
    likely = {"token": "\x00", "token_id": 3, "logprob": -9999.0, "bytes": [0]}
    first = {"token": "s", "token_id": 118, "logprob": -1.0, "bytes": [115], "top_logprobs": [likely]}
    assert choice["logprobs"]["content"][0] == first
    assert len(choice["logprobs"]["content"]) == 6


def test_chat_stream_starts_with_role_and_ends_with_finish_reason() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "seed": 0, "stop": "assist"}
    *chunks, done = events(ask("/v1/chat/completions", body))
    assert done == "DONE"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in choices) == "user: hi\n"
    assert choices[-1]["delta"] == {}
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "usage" not in chunks[0]


def test_every_field_reaches_the_engine() -> None:
    model = FakeModel()
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"5": -1.5},
        "allowed_token_ids": [5, 6],
        "banned_token_ids": [7],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [8],
        "ignore_eos": True,
        "regex": "a+",
        "seed": 7,
        "priority": 3,
        "deadline_seconds": 60,
        "cache": False,
        "return_state": True,
        "user": "me",
    }
    assert ask("/v1/completions", body, model, clock=lambda: 1e9).status_code == 200
    request = model.requests[0]
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.typical_p) == (0.5, 0.9, 3, 0.1, 0.8)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.1, -0.5, 0.25)
    assert (s.logit_bias, s.allowed, s.banned) == ({5: -1.5}, {5, 6}, {7})
    assert (s.max_tokens, s.min_tokens, s.stop, s.stop_ids, s.ignore_eos) == (9, 2, ("x", "y"), {8}, True)
    assert s.constraint is not None
    assert (s.constraint.kind, s.constraint.grammar, s.seed) == ("regex", "a+", 7)
    assert (request.priority, request.deadline, request.use_prefix_cache, request.return_state) == (
        3,
        1e9 + 60,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("fields", "kind", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type": "null"}',
        ),
        ({"grammar": "start: A"}, "lark", "start: A"),
    ],
)
def test_constraints(fields: Any, kind: str, grammar: str) -> None:
    model = FakeModel()
    assert ask("/v1/completions", {"prompt": "a", **fields}, model).status_code == 200
    constraint = model.requests[0].sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.grammar) == (kind, grammar)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": []}, "tools"),
        ({"n": 10**9}, "n"),
        ({"n": "3"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**7}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["x"] * 10**5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": [1] * 5000, "logprobs": 99}, "logprobs"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 100}, "min_tokens"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"regex": "a", "grammar": "b"}, "constraints"),
        ({"grammar": ""}, "grammar"),
        ({"session": "s", "n": 2}, "answers"),
        ({"state": "%%%"}, "state"),
        ({"deadline_seconds": 1e9}, "deadline_seconds"),
        ({"return_state": True, "max_tokens": 0, "echo": True}, "max_tokens"),
    ],
)
def test_invalid_fields_are_rejected_by_name(fields: dict[str, Any], named: str) -> None:
    model = FakeModel()
    response = ask("/v1/completions", {"prompt": "a", **fields}, model)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert len(error["message"]) < 3000
    assert model.requests == []


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"prompt": "\\ud800"}',
     b'{"prompt": "\xff"}', b'{"seed": 1e999}', b"[" * 100_000, b'{"stop":["\\udc00"]}', b'{"a":1,' * 3 + b"}"],
)  # fmt: skip
def test_non_json_bodies_are_rejected(raw: bytes) -> None:
    async def one(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    response = talk(one)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_failed_stream_ends_with_an_error_event() -> None:
    *_, last = events(ask("/v1/completions", {"prompt": "BOOM", "stream": True}))
    assert last["error"]["code"] == "engine"
    *_, last = events(
        ask(
            "/v1/completions",
            {"prompt": "abc", "stream": True, "deadline_seconds": 0.02},
            FakeModel(held=True),
        )
    )
    assert last["error"]["code"] == "deadline"


def test_cancellation_and_deadline_are_errors() -> None:
    failed = ask("/v1/completions", {"prompt": "BOOM"})
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    slow = ask("/v1/completions", {"prompt": "a", "deadline_seconds": 0.02}, FakeModel(held=True))
    assert slow.status_code == 504
    assert slow.headers["x-should-retry"] == "false"


def test_pending_tokens_are_merged() -> None:
    read = PrefillDone(n_tokens=1, n_cached=0, logprobs=None)
    one = [
        TokensEvent(tokens=(TokenLogprob(i, -1.0),), top=((TokenLogprob(9, -2.0),),), text=str(i), offsets=(i,))
        for i in range(3)
    ]
    merged = merge([read, *one])
    assert merged[0] is read
    (all_,) = merged[1:]
    assert isinstance(all_, TokensEvent)
    assert (all_.text, all_.offsets, len(all_.tokens), len(all_.top)) == ("012", (0, 1, 2), 3, 3)
