"""`linnet serve` end to end: the official client, sessions across processes, SIGTERM, keys, batch mode."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import openai
import pytest
from server_process import TEMPLATE, serving

from linnet.cli import main

KEY = "a-secret-key"
KNOWN = {"authorization": f"Bearer {KEY}"}


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_openai_client_complete_and_streamed(server: str) -> None:
    requested = {"model": "tiny", "prompt": "linear time ", "max_tokens": 30, "seed": 4}
    with client(server) as api:
        full = api.completions.create(**requested, extra_body={"ignore_eos": True})
        parts = list(api.completions.create(**requested, stream=True, extra_body={"ignore_eos": True}))
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert "".join(part.choices[0].text for part in parts if part.choices) == full.choices[0].text
        assert full.choices[0].finish_reason == "length"
        assert full.usage is not None
        assert full.usage.completion_tokens == 30
        chat = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=9, seed=1
        )
        assert chat.choices[0].message.content is not None
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len("A talk.\n<hello>\n")


def test_chat_template_stop_string_ends_an_answer(server: str) -> None:
    with client(server) as api:
        assert api.models.retrieve("tiny").model_dump()["chat_template"]["stop"] == TEMPLATE["stop"]
        chat = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=9, logit_bias={str(ord("~") + 3): 100}
        )
        assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("stop", "")


def test_openai_client_receives_prompt_top_logprobs(server: str) -> None:
    requested = {"model": "tiny", "prompt": "linear time", "max_tokens": 0, "echo": True}
    with client(server) as api:
        reported = api.completions.create(**requested, logprobs=3).choices[0].logprobs
        assert reported is not None
        assert reported.tokens == list("linear time")
        assert reported.top_logprobs is not None
        assert reported.top_logprobs[0] is None
        assert [len(one) for one in reported.top_logprobs[1:]] == [3] * 10
        ids = reported.model_dump()["top_token_ids"]
        assert [len(one) for one in ids[1:]] == [3] * 10
        bare = api.completions.create(**requested, logprobs=0).choices[0].logprobs
        assert bare is not None
        assert bare.token_logprobs == reported.token_logprobs
        chat = api.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=2,
            seed=1,
            logprobs=True,
            top_logprobs=4,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        choice = chat.choices[0]
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert [one.model_dump()["token_id"] for one in content] == choice.model_dump()["token_ids"]
        assert all(isinstance(top.model_dump()["token_id"], int) for one in content for top in one.top_logprobs)


def test_server_output_equals_linnet_sample(server: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with client(server) as api:
        answer = api.completions.create(
            model="tiny", prompt="codes ", max_tokens=40, seed=8, top_p=0.9, extra_body={"ignore_eos": True}
        )
    with pytest.raises(SystemExit):
        main(["sample", str(tiny_run), "--prompt", "codes ", "--max-tokens", "40", "--seed", "8", "--ignore-end"])
    assert capsys.readouterr().out == "codes " + answer.choices[0].text + "\n"


@pytest.mark.slow
def test_session_continues_in_another_process_with_keys_and_drain(server: str, tiny_run: Path) -> None:
    """One additional process for all three, because each takes seconds to start."""

    def go_on(address: str, session: str, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "session": session, "max_tokens": n, "seed": 3, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=KNOWN, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    straight = httpx.post(f"{server}/v1/sessions", json={}).json()["id"]
    want = [go_on(server, straight, "window ", 20), go_on(server, straight, " table", 20)]
    cut = httpx.post(f"{server}/v1/sessions", json={}).json()["id"]
    first = go_on(server, cut, "window ", 20)
    saved = httpx.get(f"{server}/v1/sessions/{cut}/state").content

    with serving(tiny_run, keys=KEY) as (address, process):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200

        def restore(data: bytes) -> httpx.Response:
            headers = {"content-type": "application/octet-stream", **KNOWN}
            return httpx.post(f"{address}/v1/sessions/restore", content=data, headers=headers)

        assert [first, go_on(address, restore(saved).json()["id"], " table", 20)] == want
        altered = restore(saved[:-1] + bytes([saved[-1] ^ 1]))
        assert altered.status_code == 400
        with client(address, KEY) as api:
            stream = api.completions.create(
                model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            started = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length", "what runs may finish"
        assert started.choices
        assert process.wait(timeout=30) == 0


def test_invalid_flags_are_rejected(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "keys"
    short.write_text("short\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "chat_template.json").write_text('{"roles": 3}')
    for flags, words in (
        ([str(tiny_run), "--host", "0.0.0.0"], "API key"),
        ([str(tiny_run), "--port", "70000"], "--port"),
        ([str(tmp_path)], "config.json"),
        ([str(tiny_run), str(tiny_run)], "NAME=FOLDER"),
        ([str(tiny_run), "--slots", "0"], "slots"),
        ([str(tmp_path / "odd")], "chat_template.json: roles is 3"),
        ([str(tiny_run), "--keys-file", "nowhere"], "nowhere"),
        ([str(tiny_run), "--keys-file", str(short)], "an API key"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(["serve", *flags])
        assert exit.value.code == 2
        assert words in capsys.readouterr().err


def test_batch_mode_resumes(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requested, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": f"line {i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": "time " * i, "max_tokens": 10, "seed": i, "ignore_eos": True},
        }
        for i in range(6)
    ]
    lines.append({"custom_id": "wrong", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x", "no": 1}})
    chat = {"messages": [{"role": "user", "content": "x"}], "logit_bias": {str(ord("~") + 3): 100}}
    lines.append({"custom_id": "chat", "url": "/v1/chat/completions", "body": chat})
    requested.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as exit:
        main(["serve", str(tiny_run), "--slots", "2", "--batch", str(requested), str(answered)])
    assert not exit.value.code
    assert "8 responses written" in capsys.readouterr().out

    def answers() -> dict[str, tuple[int, str]]:
        found = [json.loads(line) for line in answered.read_text().splitlines()]
        return {
            one["custom_id"]: (
                one["response"]["status_code"],
                json.dumps(one["response"]["body"].get("choices")),
            )
            for one in found
        }

    full = answers()
    assert {name for name, (status, _) in full.items() if status != 200} == {"wrong"}
    assert '"finish_reason": "stop"' in full["chat"][1]  # by the run's template
    # Killed after two answers, in the middle of the third.
    content = answered.read_bytes().splitlines(keepends=True)
    answered.write_bytes(b"".join(content[:2]) + content[2][:20])
    with pytest.raises(SystemExit):
        main(["serve", str(tiny_run), "--slots", "2", "--batch", str(requested), str(answered)])
    assert "6 responses written" in capsys.readouterr().out
    assert answers() == full
    requested.write_text('{"custom_id": "a", "body": {}}\n')
    with pytest.raises(SystemExit) as exit:
        main(["serve", str(tiny_run), "--batch", str(requested), str(tmp_path / "new.jsonl")])
    assert exit.value.code == 2
