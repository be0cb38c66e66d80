"""The trainer: resumed equals uninterrupted bit for bit, misfits are rejected (tests/contract: what every family promises)."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from run_comparison import assert_same_bits, lines

from linnet.core.errors import UserError
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_state
from linnet.runs.metrics import read_metrics
from linnet.train.loop import train
from linnet.train.run_log import NotFinite


@pytest.fixture(scope="module")
def uninterrupted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, several epochs long (46 sequences, 4 a batch, 2 updates each)."""
    run = tmp_path_factory.mktemp("whole") / "run"
    outcome = train(tiny.config(source), RunFolder(run), quiet=True)
    assert outcome.finished
    return run


@pytest.mark.slow
@pytest.mark.parametrize("stops", [pytest.param((20,), marks=pytest.mark.trial), (7, 8, 31)], ids=str)
def test_resumed_equals_uninterrupted(
    source: Path, uninterrupted: Path, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Also in the middle of a sequence (odd steps), where the carry counts, and across the ends of epochs."""
    cfg = tiny.config(source)
    for stop in stops:
        outcome = train(cfg, RunFolder(tmp_path), quiet=True, stop_at=stop)
        assert (outcome.step, outcome.finished) == (stop, False)
    assert train(cfg, RunFolder(tmp_path), quiet=True).finished
    assert_same_bits(open_state(tmp_path, "latest")[1], open_state(uninterrupted, "latest")[1])
    assert lines(tmp_path) == lines(uninterrupted)


@pytest.mark.slow
def test_finished_run_stays_finished(source: Path, uninterrupted: Path) -> None:
    before = open_state(uninterrupted, "latest")[1]
    outcome = train(tiny.config(source), RunFolder(uninterrupted), quiet=True)
    assert outcome.finished
    assert_same_bits(open_state(uninterrupted, "latest")[1], before)


def test_another_config_is_rejected(source: Path, uninterrupted: Path) -> None:
    with pytest.raises(UserError, match=r"holds a run with optim.lr = 0.003, but you ask for 0.1 .and seed."):
        train(tiny.config(source, **{"optim.lr": 0.1, "seed": 3}), RunFolder(uninterrupted), quiet=True)


def test_changed_data_is_rejected(tmp_path: Path) -> None:
    path = tiny.corpus(tmp_path)
    cfg = tiny.config(path)
    train(cfg, RunFolder(tmp_path / "run"), quiet=True, stop_at=2)
    path.write_bytes(path.read_bytes().replace(b"exact", b"wrong"))
    with pytest.raises(UserError, match="not what this run was trained on"):
        train(cfg, RunFolder(tmp_path / "run"), quiet=True)


def test_vocabulary_too_small_is_rejected(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.n_vocab is 100, but it must be at least the data's 259"):
        train(tiny.config(source, **{"model.n_vocab": 100}), RunFolder(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_corrupt_checkpoint_costs_only_itself(source: Path, uninterrupted: Path, tmp_path: Path) -> None:
    cfg = tiny.config(source)
    train(cfg, RunFolder(tmp_path), quiet=True, stop_at=25)
    for file in (tmp_path / "checkpoints" / "000000025").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert train(cfg, RunFolder(tmp_path), quiet=True).finished
    assert_same_bits(open_state(tmp_path, "latest")[1], open_state(uninterrupted, "latest")[1])


@pytest.mark.slow
def test_too_many_bad_updates_stop_the_run(source: Path, tmp_path: Path) -> None:
    """A learning rate beyond all bounds makes weights that overflow; the run ends with its last good weights saved."""
    changes = {"optim.lr": 1e30, "optim.clip": None, "optim.warmup_steps": 0, "train.max_bad_steps": 3}
    with pytest.raises(NotFinite, match="3 updates in a row"):
        train(tiny.config(source, **changes), RunFolder(tmp_path), quiet=True)
    state = open_state(tmp_path, "latest")[1]
    assert int(state.skipped) >= 3
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state.opt_state))
    events = [r["event"] for r in read_metrics(tmp_path) if r["kind"] == "event"]
    assert events.count("skipped") >= 3
    assert events[-1] == "failed"


def test_validation_marks_the_best_and_comes_after_the_save(uninterrupted: Path) -> None:
    evals = {r["step"]: r["loss"] for r in read_metrics(uninterrupted) if r["kind"] == "eval"}
    assert sorted(evals) == [10, 20, 30, 40]
    best = min(evals, key=lambda step: evals[step])
    assert open_state(uninterrupted, "best")[2] == best


def test_environment_and_data_are_reported(uninterrupted: Path) -> None:
    assert json.loads((uninterrupted / "environment.json").read_text())["versions"]["jax"]
    assert json.loads((uninterrupted / "data.json").read_text())["splits"]["train"]["windows"] > 0
