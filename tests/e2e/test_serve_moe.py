"""`linnet serve` with a run of the `moe` family and its bounded context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from server_process import serving, train_tiny

from linnet.cli import main

CONTEXT = tiny.MOE.context


@pytest.fixture(scope="module")
def moe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("serve-moe"), "moe")


@pytest.fixture(scope="module")
def moe_server(moe_run: Path) -> Iterator[str]:
    with serving(moe_run) as (address, process):
        yield address
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        assert f"MB per user, up to {CONTEXT} tokens." in process.stderr.read()


def complete(address: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "linear ", "max_tokens": 6, "seed": 3, "ignore_eos": True, **fields}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=60)


def output(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.slow
def test_openai_client_output_equals_linnet_sample(
    moe_server: str, moe_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = {"model": "tiny", "prompt": "codes ", "max_tokens": 20, "seed": 8, "top_p": 0.9}
    with openai.OpenAI(base_url=f"{moe_server}/v1", api_key="none", max_retries=0) as api:
        card = api.models.retrieve("tiny").model_dump()
        assert (card["family"], card["context"]) == ("moe", CONTEXT)
        entire = api.completions.create(**requested, extra_body={"ignore_eos": True}).choices[0]
        parts = list(api.completions.create(**requested, stream=True, extra_body={"ignore_eos": True}))
        assert "".join(part.choices[0].text for part in parts) == entire.text
        assert entire.finish_reason == "length"
        reported = api.completions.create(model="tiny", prompt="linear", max_tokens=0, echo=True, logprobs=2).choices[0]
        assert reported.logprobs is not None
        assert reported.logprobs.tokens == list("linear")
        cut = api.completions.create(
            model="tiny", prompt="x" * 99, max_tokens=3, extra_body={"truncate_prompt": True, "ignore_eos": True}
        )
        assert cut.usage is not None
        assert cut.usage.model_dump()["prompt_tokens_cut"] == 99 - (CONTEXT - 3)
        assert cut.usage.prompt_tokens == CONTEXT - 3
        with pytest.raises(openai.BadRequestError, match="prompt and answer") as rejection:
            api.completions.create(model="tiny", prompt="x" * 99)
        assert rejection.value.code == "context_length_exceeded"
    with pytest.raises(SystemExit):
        main(["sample", str(moe_run), "--prompt", "codes ", "--max-tokens", "20", "--seed", "8", "--ignore-end"])
    assert capsys.readouterr().out == "codes " + entire.text + "\n"


@pytest.mark.slow
def test_restored_session_continues_until_its_context_is_full(moe_server: str) -> None:
    session = httpx.post(f"{moe_server}/v1/sessions", json={}).json()["id"]
    first = output(complete(moe_server, session=session))
    saved = httpx.get(f"{moe_server}/v1/sessions/{session}/state").content
    headers = {"content-type": "application/octet-stream"}
    restored = httpx.post(f"{moe_server}/v1/sessions/restore", content=saved, headers=headers).json()
    assert restored["n_tokens"] == len("linear ") + 6
    for prompt in ("", " on"):
        texts = [output(complete(moe_server, session=id, prompt=prompt)) for id in (session, restored["id"])]
        assert texts[0] == texts[1]
    assert output(complete(moe_server, max_tokens=12)).startswith(first)
    last = complete(moe_server, session=session, prompt="", max_tokens=1000).json()["choices"][0]
    assert last["finish_reason"] == "length"
    full = complete(moe_server, session=session, prompt="x", truncate_prompt=True)
    assert full.status_code == 400
    assert "the session is" in full.json()["error"]["message"]
    assert httpx.get(f"{moe_server}/v1/sessions/{session}").json()["n_tokens"] == CONTEXT


def test_grammar_without_a_valid_token_is_a_client_error(moe_server: str) -> None:
    stuck = complete(moe_server, regex="a+b", banned_token_ids=[ord("a") + 3])
    assert (stuck.status_code, stuck.json()["error"]["code"]) == (422, "no_token_left")
    assert output(complete(moe_server, regex="a+b")).startswith("a")
