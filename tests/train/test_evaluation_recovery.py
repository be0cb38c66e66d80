"""An evaluation that is killed between any two of its writes is completed by the next resume: its line, the best mark, its sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fault_injection import Killed, Killer
from run_comparison import assert_same_bits, lines

from linnet.config.schema import OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.models.prior.config import PriorConfig
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run
from linnet.runs.metrics import read_metrics
from linnet.train.lm_task import LMTask
from linnet.train.loop import train
from linnet.train.prior_task import PriorTask

MAX_POINTS = 12


def token_config(source: Path, **changes: Any) -> RunConfig:
    settings = {"optim.warmup_steps": 1, "optim.steps": 6, "train.eval_every": 2, "train.checkpoint_every": 2}
    return tiny.config(source, **{**settings, "train.sample_tokens": 4, "train.log_every": 1, **changes})


def prior_config(folder: Path, eval_every: int, run: Path) -> RunConfig:
    vectors = np.random.default_rng(0).normal(size=(2, 40, 8)).astype(np.float32)
    np.savez(folder / "pairs.npz", image_embeds=vectors[0], text_embeds=vectors[1])
    return RunConfig(
        family="prior",
        model=PriorConfig(dim=8, depth=1, n_head=1, d_head=8, ff_mult=1, timesteps=4),
        data=PairsConfig(source=str(folder / "pairs.npz"), batch_size=4, validation_fraction=0.2),
        optim=OptimConfig(lr=0.01, warmup_steps=1, steps=4),
        train=TrainConfig(
            eval_every=eval_every, checkpoint_every=2, eval_timesteps=(2,), exports=(f"best:model:{run / 'best.pth'}",)
        ),
    )


def kept(run: Path) -> dict[str, Any]:
    """What an evaluation leaves in a run's folder."""
    return {
        "lines": lines(run),
        "best": json.loads((run / "checkpoints" / "best.json").read_text()),
        "samples": {path.name: path.read_bytes() for path in sorted((run / "samples").iterdir())},
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()),
        "exports": {path.name: path.read_bytes() for path in run.glob("*.pth")},
        "left over": sorted(path.name for path in run.rglob("*.part")),
    }


def arm_after_evaluation(patch: pytest.MonkeyPatch, killer: Killer) -> None:
    for task in (LMTask, PriorTask):

        def evaluate(self: Any, state: Any, watch: Any, real: Any = task.evaluate) -> Any:
            result = real(self, state, watch)
            killer.armed = True
            return result

        patch.setattr(task, "evaluate", evaluate)


@pytest.mark.parametrize("family", ["vq", pytest.param("prior", marks=pytest.mark.slow)])
def test_killed_at_every_point_of_an_evaluation(family: str, source: Path, tmp_path: Path) -> None:
    def config(eval_every: int, run: Path) -> RunConfig:
        if family == "prior":
            return prior_config(tmp_path, eval_every, run)
        return token_config(source, **{"train.eval_every": eval_every})

    base, whole = tmp_path / "base", tmp_path / "whole"
    train(config(0, base), RunFolder(base), quiet=True, stop_at=2)  # saved, and not evaluated
    shutil.copytree(base, whole)
    train(config(2, whole), RunFolder(whole), quiet=True, stop_at=2)
    want = kept(whole)
    assert list(want["best"]) == ["2"]
    assert len(want["samples"]) == (family == "vq")
    assert list(want["exports"]) == (["best.pth"] if family == "prior" else [])
    for n in range(1, MAX_POINTS + 1):
        run = tmp_path / f"killed-{n}"
        shutil.copytree(base, run)
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, n)
            arm_after_evaluation(patch, killer)
            try:
                train(config(2, run), RunFolder(run), quiet=True, stop_at=2)
            except Killed:
                assert killer.dead
        if not killer.dead:
            break
        train(config(2, run), RunFolder(run), quiet=True, stop_at=2)
        assert kept(run) == want, f"killed before change {n} of the disk"
    else:
        raise AssertionError("there are more points than were tried")
    # At least: the line, the best mark, the line about the end; and a sample.
    assert n > (4 if family == "vq" else 3)


@pytest.mark.slow
def test_best_checkpoint_survives_a_kill_before_it_is_marked(source: Path, tmp_path: Path) -> None:
    """The first evaluation is the best of a run that diverges and keeps one checkpoint: unmarked, it would be deleted."""
    cfg = token_config(source, **{"optim.lr": 3.0, "optim.warmup_steps": 3, "train.keep": 1})
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(cfg, RunFolder(whole), quiet=True).finished
    assert open_run(whole, "best").step == 2
    with pytest.MonkeyPatch.context() as patch:
        arm_after_evaluation(patch, Killer(patch, 2))
        with pytest.raises(Killed):
            train(cfg, RunFolder(run), quiet=True)
    assert [r["step"] for r in read_metrics(run) if r["kind"] == "eval"] == [2]
    assert not (run / "checkpoints" / "best.json").exists()
    assert train(cfg, RunFolder(run), quiet=True).finished
    assert kept(run) == kept(whole)
    assert_same_bits(open_run(run, "best").params, open_run(whole, "best").params)


def test_final_evaluation_that_was_killed_is_done_by_the_next_start(source: Path, tmp_path: Path) -> None:
    """The last step is no multiple of eval_every: only the end of the run evaluates it."""
    cfg = token_config(source, **{"optim.steps": 3, "train.sample_tokens": 0})
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(patch, 1)
        real = LMTask.evaluate

        def evaluate(self: Any, state: Any, watch: Any) -> Any:
            killer.armed = int(state.step) == 3
            return real(self, state, watch)

        patch.setattr(LMTask, "evaluate", evaluate)
        with pytest.raises(Killed):
            train(cfg, RunFolder(tmp_path), quiet=True)
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "eval"] == [2]
    assert train(cfg, RunFolder(tmp_path), quiet=True).finished
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "eval"] == [2, 3]
    assert set(kept(tmp_path)["best"]) == {"2", "3"}


def test_losses_are_completed_from_the_metrics_and_later_ones_forgotten(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=5) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": np.float32(step)}, extra={}, wait=True)
        checkpoints.mark_best(1, 0.5)
        checkpoints.mark_best(3, 0.1)
        checkpoints.set_losses({1: 0.7, 2: 0.2, 4: 0.0, 0: None}, last=2)
        assert json.loads((tmp_path / "best.json").read_text()) == {"1": 0.5, "2": 0.2}
        assert checkpoints.best() == 2
        (tmp_path / "best.json").write_text("{")
        checkpoints.set_losses({1: 0.7, 2: "x", 3: True}, last=3)
        assert checkpoints.best() == 1
