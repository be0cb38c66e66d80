"""Data from the command line: prepare, look, check, train on tokens and images, evaluate, sample."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from PIL import Image
from tokenizer_files import corpus

from linnet.cli import main
from linnet.config import codec
from linnet.data.sources.emoji import open_emoji
from linnet.tokenizers.load import open_tokenizer


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


def quietly(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert not exit.value.code


def picture(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, data prepared with it, and a run trained on that."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text").mkdir()
    lines = corpus().splitlines()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text("\n".join(lines[i::40]) + "\n")
    quietly("tokenizer", "train", folder / "text", "--out", folder / "bpe.model", "--vocab-size", "300")
    quietly("data", "prepare", folder / "text", "--tokenizer", folder / "bpe.model", "--out", folder / "data")
    cfg = tiny.config(folder / "data", **{"optim.steps": 8, "model.n_vocab": 300, "train.eval_every": 4})
    codec.save(cfg, folder / "config.json")
    quietly("train", folder / "config.json", "--out", folder / "run", "--quiet")
    return folder


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    changes = {"optim.warmup_steps": 1, "optim.steps": 4, "train.eval_every": 2, "train.sample_tokens": 1}
    cfg = tiny.config(Path("emoji-16"), **{**changes, "train.eval_sequences": 2, "model.pe_abs": True})
    data = dataclasses.replace(cfg.data, source="emoji-16", sequence_len=768, update_len=768, batch_size=2)
    codec.save(dataclasses.replace(cfg, data=data), folder / "config.json")
    quietly("train", folder / "config.json", "--out", folder / "run", "--quiet")
    return folder / "run"


def test_prepare_reports_its_output(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "prepare", tokens / "text", "--out", tokens / "bytes", "--json")
    record = json.loads(out)
    assert code == 0
    assert sum(split["documents"] for split in record["splits"].values()) == 40
    n_bytes = sum(path.stat().st_size for path in (tokens / "text").iterdir())
    assert sum(split["bytes"] for split in record["splits"].values()) == n_bytes
    text = b" ".join(path.read_bytes() for path in (tokens / "text").iterdir())
    assert sum(split["words"] for split in record["splits"].values()) == len(text.split())
    again, out, _ = run(capsys, "data", "prepare", tokens / "text", "--out", tokens / "bytes")
    assert again == 0
    assert "linnet train" in out


def test_show_prints_the_text(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "data", "show", tokens / "run", "--step", "3")
    assert code == 0
    assert "[document " in out
    assert "step 3, row 3" in out
    _, out, _ = run(capsys, "data", "show", tokens / "data", "--sequence-len", "400", "--json")
    targets = np.array(json.loads(out)["targets"])
    tokenizer = open_tokenizer(str(tokens / "data"))
    text = b"".join(path.read_bytes() for path in (tokens / "text").iterdir())
    first = tokenizer.decode(targets[0][: list(targets[0]).index(1)].tolist())
    assert len(first) > 20
    assert first in text


def test_check_finds_a_flipped_byte(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "data", "check", tokens / "data")[0] == 0
    shard = next((tokens / "data").glob("train-*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 4]) + content[1:])
    code, out, _ = run(capsys, "data", "check", tokens / "data")
    shard.write_bytes(content)
    assert code == 1
    assert shard.name in out
    assert run(capsys, "data", "check", tokens / "text")[0] == 2


def test_eval_of_a_token_run_counts_bytes_and_words(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "eval", tokens / "run", "--split", "test", "--json")
    record = json.loads(out)
    index = json.loads((tokens / "data" / "index.json").read_text())["splits"]["test"]
    assert code == 0
    assert record["bytes"] == index["bytes"]
    assert record["words"] == index["words"]
    assert record["tokens"] == index["tokens"] + index["n_documents"]
    nats = record["loss"] * record["tokens"]
    assert record["word_perplexity"] == pytest.approx(np.exp(nats / index["words"]))
    assert record["bits_per_byte"] == pytest.approx(nats / np.log(2) / index["bytes"])


def test_sample_of_a_token_run_is_text(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sample", tokens / "run", "--prompt", "the cat", "--max-tokens", "20", "--ignore-end")
    assert code == 0
    assert out.startswith("the cat")
    assert len(out) > 10


def test_another_tokenizer_is_rejected(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quietly("tokenizer", "train", tokens / "text", "--out", tmp_path / "other.model", "--vocab-size", "290")
    quietly("data", "prepare", tokens / "text", "--tokenizer", tmp_path / "other.model", "--out", tmp_path / "other")
    code, _, err = run(capsys, "eval", tokens / "run", "--source", tmp_path / "other")
    assert code == 2
    assert "another tokenizer" in err
    assert "--tokenizer" in err
    cfg = codec.load(tokens / "config.json")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source=str(tmp_path / "other")))
    codec.save(cfg, tmp_path / "config.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.model").write_bytes((tokens / "run" / "tokenizer.model").read_bytes())
    code, _, err = run(capsys, "train", tmp_path / "config.json", "--out", tmp_path / "run", "--quiet")
    assert code == 2
    assert "another tokenizer" in err
    # The run's own tokenizer makes data that fits.
    quietly("data", "prepare", tokens / "text", "--tokenizer", tokens / "run", "--out", tmp_path / "own")
    assert run(capsys, "eval", tokens / "run", "--source", tmp_path / "own", "--split", "test")[0] == 0


def test_vocabulary_larger_than_the_models_is_rejected(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        capsys, "train", "quickstart", "--data.source", tokens / "data", "--out", tokens / "no", "--quiet"
    )
    assert code == 2
    assert "model.n_vocab" in err
    assert "300" in err
    assert not (tokens / "no").exists()


def test_images_are_evaluated_by_dimension(painter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "eval", painter, "--split", "test", "--limit", "2", "--json")
    record = json.loads(out)
    assert record["bits_per_dim"] == record["bits_per_byte"]
    assert record["tokens"] == record["bytes"] == 2 * 768
    _, out, _ = run(capsys, "eval", painter, "--split", "test", "--limit", "1")
    assert "bits per dimension" in out


def test_images_are_painted_and_shown_in_the_report(painter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(p.name for p in (painter / "samples").glob("*.png")) == ["step_00000002.png", "step_00000004.png"]
    code, out, _ = run(capsys, "sample", painter, "--n", "2", "--seed", "5", "--json")
    record = json.loads(out)
    assert code == 0
    shapes = [picture(path).shape for path in record["pictures"]]
    assert shapes == [(16, 16, 3)] * 2
    assert picture(record["sheet"]).shape[1] > 32
    alone = json.loads(run(capsys, "sample", painter, "--seed", "6", "--json", "--out", painter / "alone")[1])
    assert Path(alone["pictures"][0]).read_bytes() == Path(record["pictures"][1]).read_bytes(), "a picture is its seed"
    assert run(capsys, "report", painter)[0] == 0
    assert (painter / "report.html").read_text().count("data:image/png;base64,") == 3


def test_given_half_is_unchanged(painter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures, _, _ = open_emoji(16)
    given = []
    for i in (10, 2000):
        path = tmp_path / f"{i}.png"
        file = io.BytesIO()
        Image.fromarray(pictures[i]).save(file, "PNG")
        path.write_bytes(file.getvalue())
        given.append(path)
    code, out, _ = run(capsys, "sample", painter, "--complete", *given, "--n", "2", "--out", tmp_path / "out", "--json")
    record = json.loads(out)
    assert code == 0
    assert len(record["pictures"]) == 4
    for k, path in enumerate(record["pictures"]):
        painted, original = picture(path), pictures[(10, 2000)[k // 2]]
        np.testing.assert_array_equal(painted[:8], original[:8])
        assert (painted[8:] != original[8:]).any()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "x"], "--complete"),
        (["--max-tokens", "3"], "generates images"),
        (["--complete", "nowhere.png"], "nowhere.png"),
        (["--keep", "2"], "--keep"),
    ],
)
def test_flags_that_make_no_sense_for_images(
    painter: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "sample", painter, *flags)
    assert code == 2
    assert words in err


def test_images_of_a_step_are_shown(painter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = run(capsys, "data", "show", painter, "--step", "1", "--out", tmp_path / "s.png")
    assert code == 0
    assert picture(tmp_path / "s.png").shape[1] > 100


def test_invalid_flags_are_rejected(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, words in (
        (["--validation-fraction", "0.9", "--test-fraction", "0.2"], "below 1"),
        (["--workers", "0"], "--workers"),
        (["--tokenizer", "nowhere.model"], "nowhere.model"),
        (["--from", str(tmp_path)], "named dataset"),
    ):
        code, _, err = run(capsys, "data", "prepare", tokens / "text", "--out", tmp_path / "x", *flags)
        assert code == 2
        assert words in err
        assert not (tmp_path / "x").exists()
    code, _, err = run(capsys, "data", "prepare", tokens / "data", "--out", tmp_path / "x")
    assert code == 2
    assert "not prepared data" in err
    assert run(capsys, "data")[0] == 2
    assert run(capsys, "data", "show", tmp_path)[0] == 2
