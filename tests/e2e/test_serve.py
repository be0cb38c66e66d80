"""`linnet serve` as its users meet it: the official client, sessions over a restart, SIGTERM, keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import tiny

from linnet import config as configs
from linnet.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    cfg = tiny.config(tiny.corpus(folder), **{"optim.steps": 12, "train.eval_every": 0})
    configs.save(cfg, folder / "config.json")
    with pytest.raises(SystemExit) as exit:
        main(["train", str(folder / "config.json"), "--out", str(folder / "tiny"), "--quiet"])
    assert not exit.value.code
    return folder / "tiny"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(run: Path, *flags: str, keys: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    program = str(Path(sys.executable).with_name("linnet"))
    command = [program, "serve", str(run), "--port", str(port), "--slots", "2", *flags]
    environment = {**os.environ, "LINNET_API_KEYS": keys}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                if httpx.get(f"{address}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                if process.poll() is not None:
                    pytest.fail(f"the server ended: {process.stderr and process.stderr.read()}")
            time.sleep(0.1)
        yield address, process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture(scope="module")
def server(trained: Path) -> Iterator[str]:
    with serving(trained) as (address, _):
        yield address


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_the_official_client_works_streaming_and_not(server: str) -> None:
    asked = {"model": "tiny", "prompt": "linear time ", "max_tokens": 30, "seed": 4}
    with client(server) as api:
        whole = api.completions.create(**asked, extra_body={"ignore_eos": True})
        parts = list(api.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}))
        assert [model.id for model in api.models.list()] == ["tiny"]
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 30
        chat = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=9, seed=1
        )
        assert chat.choices[0].message.content is not None


def test_what_the_server_writes_is_what_sample_writes(
    server: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with client(server) as api:
        answer = api.completions.create(
            model="tiny", prompt="codes ", max_tokens=40, seed=8, top_p=0.9, extra_body={"ignore_eos": True}
        )
    with pytest.raises(SystemExit):
        main(["sample", str(trained), "--prompt", "codes ", "--max-tokens", "40", "--seed", "8", "--ignore-end"])
    assert capsys.readouterr().out == "codes " + answer.choices[0].text + "\n"


def test_a_session_survives_a_restart(trained: Path) -> None:
    def go_on(address: str, session: str, prompt: str, n: int) -> str:
        body = {"prompt": prompt, "session": session, "max_tokens": n, "seed": 3, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with serving(trained) as (address, process):
        straight = httpx.post(f"{address}/v1/sessions", json={}).json()["id"]
        want = [go_on(address, straight, "window ", 20), go_on(address, straight, " table", 20)]
        cut = httpx.post(f"{address}/v1/sessions", json={}).json()["id"]
        first = go_on(address, cut, "window ", 20)
        saved = httpx.get(f"{address}/v1/sessions/{cut}/state").content
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    with serving(trained) as (address, _):
        headers = {"content-type": "application/octet-stream"}
        restored = httpx.post(f"{address}/v1/sessions/restore", content=saved, headers=headers).json()["id"]
        assert [first, go_on(address, restored, " table", 20)] == want
        altered = saved[:-1] + bytes([saved[-1] ^ 1])
        assert httpx.post(f"{address}/v1/sessions/restore", content=altered, headers=headers).status_code == 400


def test_keys_and_drain(trained: Path) -> None:
    with serving(trained, keys="a-secret-key") as (address, process):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        with client(address, "a-secret-key") as api:
            stream = api.completions.create(
                model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length", "what runs may finish"
        assert first.choices
        assert process.wait(timeout=30) == 0


def test_bad_flags_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "keys"
    short.write_text("short\n")
    for flags, words in (
        ([str(trained), "--host", "0.0.0.0"], "API key"),
        ([str(trained), "--port", "70000"], "--port"),
        ([str(tmp_path)], "config.json"),
        ([str(trained), str(trained)], "NAME=FOLDER"),
        ([str(trained), "--slots", "0"], "slots"),
        ([str(trained), "--keys-file", "nowhere"], "nowhere"),
        ([str(trained), "--keys-file", str(short)], "an API key"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(["serve", *flags])
        assert exit.value.code == 2
        assert words in capsys.readouterr().err


def test_a_batch_is_answered_and_goes_on_where_it_stopped(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
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
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as exit:
        main(["serve", str(trained), "--slots", "2", "--batch", str(asked), str(answered)])
    assert not exit.value.code
    assert "7 answers" in capsys.readouterr().out

    def answers() -> dict[str, tuple[int, str]]:
        found = [json.loads(line) for line in answered.read_text().splitlines()]
        return {
            one["custom_id"]: (
                one["response"]["status_code"],
                one["response"]["body"].get("choices", [{"text": ""}])[0]["text"],
            )
            for one in found
        }

    whole = answers()
    assert {name for name, (status, _) in whole.items() if status != 200} == {"wrong"}
    # Killed after two answers, in the middle of the third.
    content = answered.read_bytes().splitlines(keepends=True)
    answered.write_bytes(b"".join(content[:2]) + content[2][:20])
    with pytest.raises(SystemExit):
        main(["serve", str(trained), "--slots", "2", "--batch", str(asked), str(answered)])
    assert "5 answers" in capsys.readouterr().out
    assert answers() == whole
    asked.write_text('{"custom_id": "a", "body": {}}\n')
    with pytest.raises(SystemExit) as exit:
        main(["serve", str(trained), "--batch", str(asked), str(tmp_path / "new.jsonl")])
    assert exit.value.code == 2
