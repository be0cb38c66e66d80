"""The Python API on a run: generation equals the command, batched equals alone, streamed equals whole, scores equal `eval`."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linnet
from linnet.cli import main

MADE = Path(__file__).parents[1] / "goldens" / "runs_0_1"
PROMPT = "The finch follows"


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        main([*arguments, "--json"])
    assert not exit.value.code
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def runs() -> dict[str, linnet.Run]:
    return {name: linnet.load(MADE / name) for name in ("vq", "moe")}


@pytest.fixture(params=["vq", pytest.param("moe", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, runs: dict[str, linnet.Run]) -> linnet.Run:
    return runs[request.param]


def test_importing_the_package_loads_no_model_code() -> None:
    program = "import linnet, sys; linnet.LinnetError; print([m for m in ('jax', 'numpy', 'optax', 'tyro') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    for name in linnet.__all__:
        assert getattr(linnet, name) is not None
        assert name in dir(linnet)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = linnet.lode  # pyright: ignore[reportAttributeAccessIssue]


def test_generate_equals_the_command(run: linnet.Run) -> None:
    texts = run.generate([PROMPT, PROMPT], max_tokens=24, temperature=0.8, seed=[7, 8], echo=True)
    flags = ("--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0.8", "--seed", "7", "--n", "2")
    samples = command("sample", str(run.path), *flags)["samples"]
    assert [str(text) for text in texts] == [sample["text"] for sample in samples]
    assert [list(text.token_ids) for text in texts] == [sample["token_ids"] for sample in samples]
    assert [text.finish_reason for text in texts] == [sample["finish"] for sample in samples]


def test_list_equals_each_prompt_alone(run: linnet.Run) -> None:
    prompts = [PROMPT, "The owl", "A"]
    together = run.generate(prompts, max_tokens=40, seed=3)
    alone = [run.generate(prompt, max_tokens=40, seed=3) for prompt in prompts]
    assert together == alone
    assert [text.token_ids for text in together] == [text.token_ids for text in alone]


@pytest.mark.slow
@pytest.mark.optimized
def test_list_equals_each_prompt_alone_bit_for_bit(run: linnet.Run) -> None:
    together = run.generate([PROMPT, "The owl"], max_tokens=40, seed=3)
    alone = [run.generate(prompt, max_tokens=40, seed=3) for prompt in (PROMPT, "The owl")]
    assert [text.logprobs for text in together] == [text.logprobs for text in alone]


def test_stream_chunks_join_to_the_full_text(run: linnet.Run) -> None:
    full = run.generate(PROMPT, max_tokens=70, seed=1)
    pieces = list(run.generate(PROMPT, max_tokens=70, seed=1, stream=True))
    joined = linnet.GeneratedText.from_pieces(pieces)
    assert len(pieces) > 1
    assert (joined, joined.token_ids, joined.finish_reason) == (full, full.token_ids, full.finish_reason)
    rows = list(run.generate([PROMPT, "The owl"], max_tokens=70, seed=1, stream=True))
    assert "".join(row[0] for row in rows if row[0] is not None) == full


def test_prompts_may_be_bytes_or_ids(run: linnet.Run) -> None:
    text = run.generate(PROMPT, max_tokens=8)
    assert run.generate(PROMPT.encode(), max_tokens=8) == text
    assert run.generate(run.encode(PROMPT), max_tokens=8) == text
    assert run.decode(run.encode(PROMPT)) == PROMPT


def test_stop_strings_end_the_text(run: linnet.Run) -> None:
    full = run.generate(PROMPT, max_tokens=60, temperature=0)
    stopped = run.generate(PROMPT, max_tokens=60, temperature=0, stop=" the")
    assert stopped == full[: full.index(" the")]
    assert stopped.finish_reason == "stop"


def test_score_equals_eval(run: linnet.Run, tmp_path: Path) -> None:
    text = "The owl sees the wren. The finch follows the robin and the owl."
    source = tmp_path / "text.txt"
    source.write_text(text)
    data = str(source)
    if run.config.family == "moe":  # its tokenizer is not bytes: prepare the text with it
        data = str(tmp_path / "prepared")
        flags = ("--validation-fraction", "0", "--test-fraction", "0", "--workers", "1")
        with pytest.raises(SystemExit) as exit:
            main(["data", "prepare", str(source), "--tokenizer", str(run.path), "--out", data, *flags])
        assert not exit.value.code
    evaluated = command(
        "eval", str(_copy(run.path, tmp_path)), "--source", data, "--split", "train", "--sequence-len", "96"
    )
    score = run.score(text)
    assert len(score.logprobs) == evaluated["tokens"]
    assert score.n_bytes == evaluated["bytes"] == len(text)
    assert score.nats / len(score.logprobs) == pytest.approx(evaluated["loss"], rel=1e-6)
    assert score.bits_per_byte == pytest.approx(evaluated["bits_per_byte"], rel=1e-6)
    assert score.perplexity == pytest.approx(evaluated["perplexity"], rel=1e-5)


def _copy(run: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(run, folder / "copy"))


def test_scores_agree_with_what_generation_reports(run: linnet.Run) -> None:
    text = run.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    ids = [*run.encode(PROMPT), *text.token_ids]
    if run.config.family == "vq":  # of bytes: the text has the same ids
        score = run.score(bytes(int(token) - 3 for token in ids))
        np.testing.assert_allclose(score.logprobs[-40:], text.logprobs, atol=1e-4)


def test_score_of_a_text_does_not_depend_on_the_others(run: linnet.Run) -> None:
    texts = ["The owl.", PROMPT, "The wren sees the robin and the owl and the finch."]
    for together, text in zip(run.score(texts), texts, strict=True):
        np.testing.assert_array_equal(together.logprobs, run.score(text).logprobs)
        assert together.text == text
        assert len(together.tokens) == len(together.token_ids)
    assert "bits per byte" in run.score(PROMPT)._repr_html_()


def test_long_text_is_scored_in_segments(runs: dict[str, linnet.Run]) -> None:
    text = "The owl sees the wren. " * 20
    full = runs["vq"].score(text)
    assert len(full.logprobs) == len(text) > 4 * runs["vq"].config.tokens.update_len
    np.testing.assert_array_equal(runs["vq"].score(text[:100]).logprobs, full.logprobs[:100])
    with pytest.raises(linnet.UserError, match="the model's context"):
        runs["moe"].score(text)


@pytest.mark.parametrize("name", ["vq", "moe", pytest.param("moe-int8", marks=pytest.mark.slow)])
def test_export_is_the_run(name: str) -> None:
    run = linnet.load(MADE / name)
    export = linnet.load(MADE / "exports" / f"{name}.safetensors", tokenizer=None if name == "vq" else MADE / "moe")
    assert export.generate(PROMPT, max_tokens=16, seed=2) == run.generate(PROMPT, max_tokens=16, seed=2)
    assert export.score(PROMPT).nats == run.score(PROMPT).nats


def test_run_describes_itself(run: linnet.Run) -> None:
    assert run.config.family in repr(run)
    assert f"<td>{run.step:,}</td>" in run._repr_html_()
    assert run.generate("<", max_tokens=1, echo=True)._repr_html_().startswith("<pre>&lt;")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"seed": [1, 2]}, "one for each of the 1 prompts"),
        ({"stop": ""}, "stop"),
        ({"prompt": []}, "at least one prompt"),
        ({"prompt": 7}, "a str or bytes"),
        ({"prompt": "\ud800"}, "valid Unicode"),
        ({"prompt": np.array([10**6])}, "a prompt token"),
    ],
)
def test_bad_settings_are_errors_before_the_first_token(
    runs: dict[str, linnet.Run], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(linnet.UserError, match=message) as error:
        runs["vq"].generate(stream=True, **given)  # not yet iterated
    assert isinstance(error.value, linnet.LinnetError)
    assert "Fix:" in str(error.value)


def test_bad_runs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(linnet.UserError, match="not a run"):
        linnet.load(tmp_path / "nothing")
    with pytest.raises(linnet.UserError, match="checkpoint"):
        linnet.load(MADE / "vq", checkpoint="worst")
    with pytest.raises(linnet.UserError, match="float32, bfloat16 or int8"):
        linnet.load(MADE / "vq", weights="float16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(linnet.UserError, match="linnet import"):
        linnet.load(MADE / "exports" / "vq.npz")
    with pytest.raises(linnet.UserError, match="prior"):
        linnet.load(MADE / "prior", weights="int8")
    with pytest.raises(linnet.UserError, match=r"generate_images\(\)"):
        linnet.load(MADE / "pixels").generate("x")
