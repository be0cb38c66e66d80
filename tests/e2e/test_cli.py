"""The command as a user meets it: every subcommand on a tiny run, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny

from linnet.cli import main
from linnet.cli.dispatch import COMMANDS
from linnet.config import codec
from linnet.core import params, rng
from linnet.models import registry
from linnet.runs.load import write_run


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    cfg = tiny.config(tiny.corpus(folder), **{"optim.steps": 12, "train.eval_every": 6, "train.sample_tokens": 20})
    codec.save(cfg, folder / "config.json")
    with pytest.raises(SystemExit) as exit:
        main(["train", str(folder / "config.json"), "--out", str(folder / "run"), "--quiet"])
    assert not exit.value.code
    return folder / "run"


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)
    assert run(capsys, "trian")[0] == 2


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"linnet {command}" in out


def test_train_writes_a_run(trained: Path) -> None:
    assert {"config.json", "metrics.jsonl", "checkpoints", "samples", "environment.json"} <= {
        p.name for p in trained.iterdir()
    }
    assert sorted(p.name for p in (trained / "samples").iterdir()) == ["step_00000006.txt", "step_00000012.txt"]


def test_config_repeats_the_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "train", str(trained / "config.json"), "--out", str(tmp_path / "again"), "--quiet")[0] == 0

    def losses(path: Path) -> list[float]:
        return [json.loads(x)["loss"] for x in (path / "metrics.jsonl").read_text().splitlines() if '"train"' in x]

    assert losses(tmp_path / "again") == losses(trained)


def test_unknown_flag_is_rejected_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "train", "quickstart", "--model.n-layers", "3")
    assert code == 2
    assert "--model.n-layer" in out + err


def test_inconsistent_flags_are_rejected_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        "enwik8",
        "--data.update-len",
        "1000",
        "--data.sequence-len",
        "8000",
        "--out",
        str(tmp_path / "x"),
    ]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert "1024" in out + err
    assert not (tmp_path / "x").exists()


def test_unknown_preset(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "enwik9")
    assert code == 2
    assert "quickstart" in err


def test_eval_counts_every_token_once(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "validation", "test"):
        code, out, _ = run(capsys, "eval", str(trained), "--split", split, "--json", "--batch-size", "7")
        assert code == 0
        record = json.loads(out)
        described = json.loads((trained / "data.json").read_text())["splits"][split]
        assert (record["tokens"], record["bytes"]) == (described["tokens"], described["bytes"])
        assert record["bits_per_token"] == pytest.approx(record["nats_per_token"] / np.log(2))
        assert record["perplexity"] == pytest.approx(np.exp(record["nats_per_token"]))


def test_eval_does_not_depend_on_the_batch(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        json.loads(run(capsys, "eval", str(trained), "--json", "--batch-size", size)[1])["nats_per_token"]
        for size in ("1", "5")
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_eval_table_and_other_text(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("linear time attention " * 20)
    code, out, _ = run(capsys, "eval", str(trained), "--source", str(tmp_path / "other.txt"))
    assert code == 0
    assert "bits per byte" in out
    assert "440 bytes" in out
    assert (trained / "eval_source.svg").read_text().startswith("<svg")


def test_sample_depends_on_its_seed_alone(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["sample", str(trained), "--prompt", "linear ", "--max-tokens", "40", "--json"]
    one = json.loads(run(capsys, *base, "--seed", "5")[1])["samples"]
    three = json.loads(run(capsys, *base, "--seed", "5", "--n", "3")[1])["samples"]
    other = json.loads(run(capsys, *base, "--seed", "6")[1])["samples"]
    assert one[0]["text"] == three[0]["text"]
    assert len({s["text"] for s in three}) == 3
    assert one[0]["text"] != other[0]["text"]


def test_sample_streams_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sample", str(trained), "--prompt", "time ", "--max-tokens", "30", "--temperature", "0")
    assert code == 0
    assert out.startswith("time ")
    again = run(capsys, "sample", str(trained), "--prompt", "time ", "--max-tokens", "30", "--temperature", "0")[1]
    assert out == again


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "1e-9"),
        ("--repetition-penalty", "0.001"),
        ("--stop", "\udcfe"),  # how a byte that is no text comes from a command line
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--max-tokens", "0"),
        ("--n", "0"),
        ("--top-k", "-1"),
    ],
)
def test_bad_sampling_flags_are_rejected(
    trained: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "sample", str(trained), flag, value)
    assert code == 2
    assert flag.strip("-").replace("-", "_") in (out + err).replace("-", "_")


def test_report(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "report", str(trained))[0] == 0
    page = (trained / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("command", ["eval", "sample", "report", "export"])
def test_folders_without_a_run_are_rejected(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, command, str(tmp_path))
    assert code == 2
    assert "not a run" in err


def test_export_and_import_round_trip(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, back = tmp_path / "w.safetensors", tmp_path / "back"
    assert run(capsys, "export", str(trained), "--out", str(file))[0] == 0
    assert run(capsys, "import", "safetensors", str(file), "--out", str(back))[0] == 0
    first, second = (json.loads(run(capsys, "eval", str(r), "--json")[1])["nats_per_token"] for r in (trained, back))
    assert first == second
    assert run(capsys, "import", "safetensors", str(file), "--out", str(back))[0] == 2


def test_transformer_vq_tree_becomes_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, back = tmp_path / "tree.npz", tmp_path / "back"
    assert run(capsys, "export", str(trained), "--format", "transformer-vq", "--out", str(file))[0] == 0
    source = codec.load(trained / "config.json").data.source
    assert run(capsys, "import", "transformer-vq", str(file), "--out", str(back), "--source", source)[0] == 0
    first, second = (json.loads(run(capsys, "eval", str(r), "--json")[1])["nats_per_token"] for r in (trained, back))
    assert first == pytest.approx(second, rel=1e-6)
    assert run(capsys, "sample", str(back), "--max-tokens", "5")[0] == 0


def test_presets_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert "enwik8" in run(capsys, "presets")[1]
    assert json.loads(run(capsys, "presets", "--json")[1])["enwik8"]["model"]["n_layer"] == 24


def test_text_outside_the_vocabulary_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of 100 ids cannot be evaluated on bytes: ids beyond would be read as others."""
    cfg = tiny.config(tiny.corpus(tmp_path), **{"model.n_vocab": 100})
    family = registry.get("vq")
    key = rng.root(0)
    weights = (params.init(specs(cfg.model), key) for specs in (family.param_specs, family.buffer_specs))
    write_run(tmp_path / "run", cfg, *weights)
    code, _, err = run(capsys, "eval", str(tmp_path / "run"))
    assert code == 2
    assert "has 100 ids and no tokenizer" in err
