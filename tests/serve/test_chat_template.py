"""The chat template of a run: what it makes of a conversation, how its stop strings end an answer, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, ask, talk

from linnet.core.errors import UserError
from linnet.serve.chat_template import FILE, PLAIN, ChatTemplate, read_template
from linnet.serve.http.batch import call

MARKED = {
    "beginning": "<s>",
    "roles": {
        "system": {"prefix": "[system] ", "suffix": "[end]\n"},
        "user": {"prefix": "[user] ", "suffix": "[end]\n"},
        "assistant": {"prefix": "[model] ", "suffix": "[end]\n"},
    },
    "stop": ["[end]"],
}


def model_with(tmp_path: Path, template: Any) -> FakeModel:
    (tmp_path / FILE).write_text(json.dumps(template))
    model = FakeModel()
    model.template = read_template(tmp_path)
    return model


def test_run_without_one_has_the_plain_one(tmp_path: Path) -> None:
    assert read_template(tmp_path) is PLAIN
    assert PLAIN.text([("user", "hi")], continues=False) == "user: hi\nassistant:"


def test_conversation_is_rendered_by_the_runs_template(tmp_path: Path) -> None:
    model = model_with(tmp_path, MARKED)
    messages = [
        {"role": "developer", "content": "be"},  # as the system's, where it has no words of its own
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ask("/v1/chat/completions", {"messages": messages}, model)
    want = b"<s>[system] be[end]\n[user] a[end]\n[model] b[end]\n[user] c[end]\n[model] "
    assert model.tokenizer.decode(model.requests[0].prompt) == want


def test_its_stop_strings_end_an_answer(tmp_path: Path) -> None:
    model = model_with(tmp_path, MARKED)
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 0, "max_tokens": 60}
    answer = ask("/v1/chat/completions", body, model).json()  # the fake says its prompt again
    assert answer["choices"][0]["message"]["content"] == "<s>[user] hi"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (
        ask("/v1/chat/completions", {**body, "stop": "user"}, model).json()["choices"][0]["message"]["content"]
        == "<s>["
    )
    ask("/v1/completions", {"prompt": "[end]"}, model)
    assert [request.sampling.stop for request in model.requests] == [("[end]",), ("[end]", "user"), ()]


def test_stop_string_that_ended_an_answer_is_not_read_again_in_a_session(tmp_path: Path) -> None:
    model = model_with(tmp_path, MARKED)

    async def twice(client: httpx.AsyncClient) -> None:
        await client.post("/v1/sessions", json={})
        for content in "ab":
            body = {"messages": [{"role": "user", "content": content}], "session": "session-0", "seed": 0}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    talk(twice, model)
    texts = [model.tokenizer.decode(request.prompt) for request in model.requests]
    assert texts == [b"<s>[user] a[end]\n[model] ", b"\n[user] b[end]\n[model] "]


def test_separator_between_turns_can_be_set(tmp_path: Path) -> None:
    template = model_with(tmp_path, {**MARKED, "between": "||", "answer": ">"}).template
    assert isinstance(template, ChatTemplate)
    assert template.text([], continues=True) == "||>"


def test_role_that_it_does_not_know_is_rejected_and_the_session_is_free_again(tmp_path: Path) -> None:
    roles = {role: MARKED["roles"][role] for role in ("user", "assistant")}
    model = model_with(tmp_path, {**MARKED, "roles": roles})

    async def wrong_then_right(client: httpx.AsyncClient) -> list[httpx.Response]:
        await client.post("/v1/sessions", json={})
        return [
            await client.post(
                "/v1/chat/completions", json={"messages": [{"role": role, "content": "x"}], "session": "session-0"}
            )
            for role in ("system", "user")
        ]

    wrong, right = talk(wrong_then_right, model)
    assert wrong.status_code == 400
    assert "'system'" in wrong.json()["error"]["message"]
    assert right.status_code == 200


def test_models_endpoint_reports_templates_that_can_be_read_back(tmp_path: Path) -> None:
    async def cards(client: httpx.AsyncClient) -> Any:
        return (await client.get("/v1/models")).json()["data"][0]["chat_template"]

    for model in (model_with(tmp_path, MARKED), FakeModel()):
        assert model_with(tmp_path, talk(cards, model)).template == model.template


def test_batch_mode_applies_the_chat_template(tmp_path: Path) -> None:
    model = model_with(tmp_path, MARKED)

    async def line(client: httpx.AsyncClient) -> None:
        app = client._transport.app  # pyright: ignore
        body = {"messages": [{"role": "user", "content": "q"}]}
        assert (await call(app, "/v1/chat/completions", body, None))[0] == 200

    talk(line, model)
    assert model.tokenizer.decode(model.requests[0].prompt) == b"<s>[user] q[end]\n[model] "


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["JSON"]),
        ("\udcff", ["JSON in UTF-8"]),
        ("[]", ["the template", "[]", "an object"]),
        ({}, ["roles", "missing"]),
        ({**MARKED, "jinja": "{{ x }}"}, ["jinja", "one of beginning, roles"]),
        ({**MARKED, "beginning": 3}, ["beginning is 3", "a string"]),
        ({**MARKED, "roles": {"user": {}}}, ["roles", "user and assistant", "add 'assistant'"]),
        ({**MARKED, "roles": {**MARKED["roles"], "tool": {}}}, ["tool", "system, developer"]),
        ({**MARKED, "roles": {**MARKED["roles"], "user": "x"}}, ["roles.user is 'x'"]),
        ({**MARKED, "roles": {**MARKED["roles"], "user": {"prefix": None}}}, ["roles.user.prefix is None", "a string"]),
        ({**MARKED, "roles": {**MARKED["roles"], "user": {"before": "x"}}}, ["before", "prefix, suffix"]),
        ({**MARKED, "stop": "x"}, ["stop is 'x'", "a list"]),
        ({**MARKED, "stop": [""]}, ["stop[0]", "1 to 1024 bytes"]),
        ({**MARKED, "stop": ["x", 5]}, ["stop[1] is 5"]),
        ({**MARKED, "stop": [str(i) for i in range(9)]}, ["9 strings", "at most 8"]),
        ({**MARKED, "answer": "\ud800"}, ["answer", "surrogate"]),
        ('{"roles": {}, "roles": {}}', ["'roles'", "given once"]),
        ("[" * 60_000, ["JSON"]),
        (" " * 70_000, ["size", "70000", "shorten"]),
    ],
)
def test_wrong_file_is_rejected_by_field(tmp_path: Path, content: Any, words: list[str]) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as rejection:
        read_template(tmp_path)
    for word in (FILE, "Fix:", *words):
        assert word in str(rejection.value)


def test_file_that_the_docs_show_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "serve.md").read_text()
    shown = page.split("```json\n")[1].split("```")[0]
    template = model_with(tmp_path, json.loads(shown)).template
    assert template == model_with(tmp_path, MARKED).template  # what may be left out is shown with its default
