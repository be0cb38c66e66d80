"""Grok-1 as its release feeds it: imported by the command, then prompts as text and as ids through `sample` and the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_model import FakeModel, ask, talk
from grok_files import GOLDENS, TINY_A
from sentencepiece import SentencePieceProcessor

from linnet.cli.dispatch import main as command
from linnet.runs.load import open_run
from linnet.serve.engine import EngineConfig
from linnet.serve.served import ServedModel, serve_model

TOKENIZER = GOLDENS / "e2e_A_tokenizer.model"
RUNS: list[dict[str, Any]] = json.loads((GOLDENS / "e2e_A.json").read_text())["runs"]
TEXTS = [run for run in RUNS if "text" in run]
SP = SentencePieceProcessor(model_file=str(TOKENIZER))
BINARY = {"content-type": "application/octet-stream"}
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def linnet(*argv: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command(list(argv))
    assert not ended.value.code


def import_tiny(folder: Path, dtype: str) -> Path:
    linnet("import", "grok-1", str(TINY_A), "--tokenizer", str(TOKENIZER), "--out", str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["model"]["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_tiny(tmp_path_factory.mktemp("grok") / "tiny", "float32")


def served(folder: Path) -> Iterator[ServedModel]:
    run = open_run(folder)
    tokenizer, config = run.vocabulary.tokenizer, EngineConfig(n_slots=4)
    model = serve_model("tiny", run.lm, run.cfg.model, run.params, run.buffers, tokenizer, None, config)
    yield model
    model.engine.stop(within=1.0)


@pytest.fixture(scope="module")
def model(imported: Path) -> Iterator[ServedModel]:
    yield from served(imported)


def complete(model: ServedModel, **fields: Any) -> dict[str, Any]:
    response = ask("/v1/completions", {**GREEDY, **fields}, model)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def sample(run: Path, capsys: Any, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    linnet("sample", str(run), "--temperature", "0", "--ignore-end", "--json", *flags)
    return json.loads(capsys.readouterr().out)["samples"][0]


@pytest.mark.parametrize("run", RUNS[:2] + TEXTS, ids=lambda run: str(run.get("text", run["prompt"])))
def test_sample_writes_what_the_release_writes(run: dict[str, Any], imported: Path, capsys: Any) -> None:
    n = str(len(run["out"]))
    if "text" in run:
        found = sample(imported, capsys, "--prompt", run["text"], "--max-tokens", n)
    else:
        found = sample(imported, capsys, "--prompt-ids", *map(str, run["prompt"]), "--max-tokens", n)
    assert found["token_ids"] == run["float32_greedy"]
    assert found["text"] == SP.decode(run["prompt"] + run["float32_greedy"])


@pytest.mark.parametrize("i", range(len(RUNS)))
def test_server_answers_as_the_release_in_float32(i: int, model: ServedModel) -> None:
    run = RUNS[i]
    for prompt in [run["prompt"], run["text"]] if "text" in run else [run["prompt"]]:
        choice = complete(model, prompt=prompt, max_tokens=len(run["out"]))
        assert choice["token_ids"] == run["float32_greedy"]
        assert choice["text"] == SP.decode(run["float32_greedy"])
        full = complete(model, prompt=prompt, max_tokens=len(run["out"]), echo=True)
        assert full["token_ids"] == run["prompt"] + run["float32_greedy"]
        assert full["text"] == SP.decode(run["prompt"] + run["float32_greedy"])


def test_server_answers_as_the_release_in_bfloat16(tmp_path: Path) -> None:
    certain = [run for run in RUNS if run["router_margin"] >= 0.01 and min(run["float32_gap"]) >= 0.05]
    assert certain
    for model in served(import_tiny(tmp_path / "run", "bfloat16")):
        for run in certain:
            assert complete(model, prompt=run["prompt"], max_tokens=len(run["out"]))["token_ids"] == run["out"]


@pytest.mark.parametrize("echo", [False, True])
def test_stream_joins_to_the_full_decode(model: ServedModel, echo: bool) -> None:
    for run in TEXTS:
        fields = {"prompt": run["text"], "max_tokens": len(run["out"]), "stream": True, "echo": echo}
        lines = ask("/v1/completions", {**GREEDY, **fields}, model).text.split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(choice["text"] for one in events for choice in one["choices"])
        assert text == SP.decode((run["prompt"] if echo else []) + run["float32_greedy"])


def test_output_with_a_leading_eos_needs_it_in_the_prompt(model: ServedModel) -> None:
    run = next(run for run in RUNS if run["leading_2_changes_it"])
    choice = complete(model, prompt=[2, *run["prompt"]], max_tokens=len(run["out"]))
    assert choice["token_ids"] == run["with_leading_2"]["float32_greedy"]


def test_model_states_its_policy_and_its_tokenizer(model: ServedModel) -> None:
    async def card(client: httpx.AsyncClient) -> Any:
        return (await client.get("/v1/models/tiny")).json()

    found = talk(card, model)
    assert (found["begin_id"], found["end_id"]) == (None, 2)
    assert found["tokenizer"] == {"kind": "sentencepiece", "rules": "released", "byte_exact": False}


def test_tokens_and_texts_are_sentencepieces(model: ServedModel) -> None:
    for text in (" two  spaces", "The answer", "", "\n\n a", "é漢🐈"):
        for special in (None, True, False):
            found = ask("/v1/tokenize", {"text": text, "add_special_tokens": special}, model).json()
            assert found["tokens"] == SP.encode(text)
    for ids in ([433, 433, 290], [2, 290, 3], [234, 234], SP.encode("é漢🐈")[:4]):
        assert ask("/v1/detokenize", {"tokens": ids}, model).json()["text"] == SP.decode(ids)


def test_empty_prompt_is_rejected(model: ServedModel, imported: Path, capsys: Any) -> None:
    session = ask("/v1/sessions", {}, model).json()["id"]
    for fields in ({"prompt": ""}, {"prompt": []}, {"prompt": ["the", ""]}, {"prompt": "", "session": session}, {}):
        response = ask("/v1/completions", {"max_tokens": 4, **fields}, model)
        assert response.status_code == 400
        assert "begin-of-sequence" in response.json()["error"]["message"]
    assert ask("/v1/completions", {"prompt": "the", "session": session, "max_tokens": 2}, model).status_code == 200
    with pytest.raises(SystemExit) as ended:
        command(["sample", str(imported)])
    assert ended.value.code == 2
    assert "begin-of-sequence" in capsys.readouterr().err


def test_session_continues_one_text(model: ServedModel) -> None:
    """The second prompt gets no space in front, and an answer in two parts is the answer in one."""
    text, more, n = "import sys\n\ncl", "ass A", 6
    ids = SP.encode(text)
    session = ask("/v1/sessions", {}, model).json()["id"]
    first = complete(model, session=session, prompt=text, max_tokens=2)
    second = complete(model, session=session, prompt=more, max_tokens=n, echo=True)
    third = complete(model, session=session, prompt="", max_tokens=n)
    continued = second["token_ids"][: -n or None]
    assert SP.decode([*ids, *continued]) == text + more
    full = complete(model, prompt=[*ids, *first["token_ids"], *continued], max_tokens=2 * n)
    assert [*second["token_ids"][-n:], *third["token_ids"]] == full["token_ids"]
    assert SP.decode([*ids, *second["token_ids"], *third["token_ids"]]) == text + second["text"] + third["text"]

    async def count(client: httpx.AsyncClient) -> int:
        saved = (await client.get(f"/v1/sessions/{session}/state")).content
        restored = (await client.post("/v1/sessions/restore", content=saved, headers=BINARY)).json()
        shown = (await client.get(f"/v1/sessions/{session}")).json()
        assert shown["n_tokens"] == restored["n_tokens"]
        return shown["n_tokens"]

    assert talk(count, model) == len(ids) + 2 + len(continued) + 2 * n


def test_logprobs_of_an_echo_have_none_for_the_first_token(model: ServedModel) -> None:
    run = TEXTS[-1]
    choice = complete(model, prompt=run["text"], max_tokens=2, echo=True, logprobs=2)
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [len(ids)] * 3
    assert logprobs["text_offset"] == [len(SP.decode(ids[:i])) for i in range(len(ids))]
    alone = complete(model, prompt=[run["prompt"][0]], max_tokens=0, echo=True, logprobs=1)["logprobs"]
    assert alone["token_logprobs"] == [None]


def test_full_context_may_be_used(model: ServedModel) -> None:
    assert model.context is not None
    assert len(complete(model, prompt=[7] * model.context, max_tokens=9)["token_ids"]) == 1
    assert len(complete(model, prompt=[7] * (model.context - 2), max_tokens=9)["token_ids"]) == 3
    response = ask("/v1/completions", {"prompt": [7] * (model.context + 1)}, model)
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_batch_file_is_answered_the_same(imported: Path, tmp_path: Path) -> None:
    run = TEXTS[1]
    body = {**GREEDY, "prompt": run["text"], "max_tokens": len(run["out"])}
    lines = [("text", body), ("empty", {"prompt": ""}), ("chat", {"messages": [{"role": "user", "content": "the"}]})]
    urls = {"chat": "/v1/chat/completions"}
    requested = [{"custom_id": id, "url": urls.get(id, "/v1/completions"), "body": body} for id, body in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, requested)))
    linnet("serve", str(imported), "--slots", "4", "--batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {one["custom_id"]: one["response"] for one in answers}
    assert {id: one["status_code"] for id, one in found.items()} == {"text": 200, "empty": 400, "chat": 200}
    assert found["text"]["body"]["choices"][0]["text"] == run["out_text"]


def test_bos_can_be_left_out_of_a_request() -> None:
    """The fake notes what it is asked; the engine's own part is above."""
    fake = FakeModel()
    for fields, wanted in (({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)):
        ask("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}, fake)
        assert fake.requests[-1].add_special_tokens is wanted
    assert ask("/v1/tokenize", {"text": "a", "add_special_tokens": True}, fake).json()["tokens"] == [1, 100]
    assert ask("/v1/tokenize", {"text": "a"}, fake).json()["tokens"] == [100]
