"""A run finds its data from any working directory, and accepts a new location whose content is the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from linnet.cli.dispatch import main
from linnet.config import codec
from linnet.config.schema import DataConfig, PairsConfig, RunConfig
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.data.embeddings import open_pairs
from linnet.data.sources.locations import absolute_paths, rebase_changed, resolve_paths, with_base, without_local_paths
from linnet.runs.folder import RunFolder
from linnet.runs.relocated import relocated
from linnet.train.loop import train


def command(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([*line])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


def short_config(source: str, **changes: Any) -> RunConfig:
    fast = {"optim.warmup_steps": 1, "optim.steps": 2, "train.eval_every": 0}
    return tiny.config(Path(source), **{**fast, **changes})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on relative paths: its text, and a file to validate on."""
    folder = tmp_path_factory.mktemp("project")
    tiny.corpus(folder)
    (folder / "held.txt").write_text("some other words " * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cfg = short_config("corpus.txt", **{"data.validation_files": ("held.txt",)})
        assert train(cfg, RunFolder(Path("run")), quiet=True).finished
    return folder


@pytest.fixture
def moved(project: Path, tmp_path: Path) -> Path:
    """A copy of the run alone, whose `base` no longer exists: the project was moved elsewhere."""
    run = tmp_path / "copy"
    shutil.copytree(project / "run", run)
    cfg = codec.load(run / "config.json")
    gone = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, base=str(tmp_path / "gone")))
    codec.save(gone, run / "config.json")
    return run


def test_typed_path_and_its_absolute_form_are_kept(project: Path) -> None:
    cfg = codec.load(project / "run" / "config.json")
    assert (cfg.data.source, cfg.data.base) == ("corpus.txt", str(project))
    found = json.loads((project / "run" / "data.json").read_text())
    assert found["source"] == "corpus.txt"
    assert found["paths"] == {"source": str(project / "corpus.txt"), "validation_files": [str(project / "held.txt")]}


def test_run_is_evaluated_and_resumed_from_another_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("a file of the same name that is not the run's")
    code, said = command(capsys, "eval", str(project / "run"), "--limit", "1", "--json")
    assert code == 0, said
    assert command(capsys, "train", str(project / "run"), "--quiet")[0] == 0
    assert codec.load(project / "run" / "config.json").data.base == str(project)


def test_new_location_is_accepted_by_content(
    project: Path, moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new, other = tmp_path / "new", tmp_path / "other.txt"
    new.mkdir()
    for name in ("corpus.txt", "held.txt"):
        shutil.copy(project / name, new / name)
    other.write_text("not what it was trained on " * 300)
    monkeypatch.chdir(tmp_path)
    code, said = command(capsys, "eval", str(moved))
    assert code == 2
    assert "--data.source" in said  # which works:
    code, said = command(capsys, "eval", str(moved), "--data.source", "new/corpus.txt", "--limit", "1", "--json")
    assert code == 0, said
    assert command(capsys, "report", str(moved), "--data.source", "new/corpus.txt")[0] == 0
    shutil.copy(project / "held.txt", tmp_path / "held.txt")
    before = (moved / "config.json").read_bytes()
    for line in (["eval", str(moved)], ["report", str(moved)], ["train", str(moved)]):
        code, said = command(capsys, *line, "--data.source", "other.txt")
        assert (code, "is not what the run in" in said) == (2, True), said
        assert f"linnet eval {moved} --source other.txt" in said
    assert (moved / "config.json").read_bytes() == before
    assert command(capsys, "train", str(moved), "--data.source", "new/corpus.txt", "--quiet")[0] == 0
    assert codec.load(moved / "config.json").data.source == "new/corpus.txt"
    monkeypatch.chdir(new)
    code, said = command(capsys, "eval", str(moved), "--limit", "1", "--json")
    assert code == 0, said


def test_other_data_and_its_new_location_exclude_each_other(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = command(capsys, "eval", str(project / "run"), "--source", "a", "--data.source", "b")
    assert code == 2
    assert "leave one of them out" in said


def test_paths_are_found_below_the_base_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, here = tmp_path / "base", tmp_path / "here"
    for folder in (base, here):
        folder.mkdir()
        (folder / "a.txt").write_text(f"{folder.name} words " * 500)
    (here / "b.txt").write_text("x")
    monkeypatch.chdir(here)
    cfg = DataConfig(source="a.txt", test_files=("b.txt", str(here / "a.txt")), base=str(base))
    assert resolve_paths(cfg).source == str(base / "a.txt")
    assert resolve_paths(cfg).test_files == ("b.txt", str(here / "a.txt"))  # not below base; absolute already
    assert resolve_paths(dataclasses.replace(cfg, source="*.txt")).source == str(base / "*.txt")
    assert (
        load_dataset(DataConfig(source="a.txt", base=str(base), sequence_len=64, update_len=64), 0).raw("train")[:4]
        == b"base"
    )
    for name in ("python-stdlib", "emoji-32", "hf:a/b"):
        assert resolve_paths(dataclasses.replace(cfg, source=name)).source == name
    assert with_base(RunConfig(data=DataConfig(source="a.txt"))).data.base == str(here)
    assert with_base(RunConfig(data=DataConfig(source="nothing.txt"))).data.base is None
    assert with_base(RunConfig(data=DataConfig(source=str(here / "a.txt")))).data.base is None
    assert absolute_paths(DataConfig(source="a.txt")) == {"source": str(here / "a.txt")}


def test_flag_is_relative_to_the_working_directory_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.txt").write_text("x")
    old = RunConfig(data=DataConfig(source="a.txt", validation_files=("held.txt",), base=str(tmp_path)))
    monkeypatch.chdir("/")
    new = dataclasses.replace(old, data=dataclasses.replace(old.data, source="b.txt"))
    got = rebase_changed(new, old).data
    assert isinstance(got, DataConfig)
    assert (got.source, got.validation_files, got.base) == ("b.txt", (str(tmp_path / "held.txt"),), None)
    assert rebase_changed(old, old) is old


def test_new_source_leaves_the_other_files_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held.txt").write_text("x")
    cfg = RunConfig(data=DataConfig(source="gone.txt", validation_files=("held.txt",), base=str(tmp_path)))
    monkeypatch.chdir("/")
    got = relocated(cfg, "/elsewhere/gone.txt").data
    assert isinstance(got, DataConfig)
    assert (got.source, got.validation_files, got.base) == ("/elsewhere/gone.txt", (str(tmp_path / "held.txt"),), None)


def test_pairs_are_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(2, 40, 8)).astype(np.float32)
    for i, name in enumerate(("img_emb", "text_emb")):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / f"{name}_0.npy", vectors[i])
    monkeypatch.chdir("/")
    cfg = PairsConfig(images="img_emb", texts="text_emb", base=str(tmp_path))
    assert open_pairs(cfg, 0).fingerprint == open_pairs(PairsConfig(source=str(tmp_path)), 0).fingerprint
    with pytest.raises(UserError, match="data.images"):
        open_pairs(dataclasses.replace(cfg, base=None), 0)


def test_settings_for_other_machines_name_no_files_of_this_one(tmp_path: Path) -> None:
    cfg = tiny.config(tmp_path / "a.txt", **{"data.base": str(tmp_path), "train.exports": ("best:model:/p/best.pth",)})
    found = without_local_paths(cfg)
    assert (found.data.base, found.train.exports) == (None, ())
