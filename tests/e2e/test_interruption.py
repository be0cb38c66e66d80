"""Interruptions of a real process: signals, kills, two runs on one folder. What continues must equal what was never stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from linnet.config import codec
from linnet.core.pytree import named_leaves
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.load import open_state
from linnet.runs.metrics import read_metrics

LINNET = [sys.executable, "-c", "from linnet.cli import main; main()"]


def start(config: Path, run: Path) -> subprocess.Popen[str]:
    command = [*LINNET, "train", str(config), "--out", str(run), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str], seconds: float = 600) -> None:
    """Until the run has logged that step (or ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            return
        if (run / "metrics.jsonl").exists() and any(
            r["kind"] == "train" and r["step"] >= step for r in read_metrics(run)
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in {seconds} s")


def same_bits(a: Path, b: Path) -> None:
    left, right = (dict(named_leaves(open_state(run, "latest")[1])) for run in (a, b))
    for name, value in left.items():
        assert np.asarray(value).tobytes() == np.asarray(right[name]).tobytes(), f"{name} differs"


def write_config(folder: Path, steps: int) -> Path:
    changes = {"optim.steps": steps, "train.log_every": 1, "train.checkpoint_every": 3, "train.eval_every": 50}
    cfg = tiny.config(tiny.corpus(folder), **changes)
    path = folder / "config.json"
    codec.save(cfg, path)
    return path


def test_first_signal_saves_second_run_is_rejected_and_resuming_is_exact(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3000)
    process = start(config, tmp_path / "run")
    wait_for_step(tmp_path / "run", 5, process)
    second = start(config, tmp_path / "run")
    _, words = second.communicate(timeout=600)
    assert second.returncode == 2
    assert str(process.pid) in words
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=600)
    assert process.returncode == 75, words
    _, state, step = open_state(tmp_path / "run", "latest")
    assert step >= 5
    assert int(state.step) == step
    events = [r["event"] for r in read_metrics(tmp_path / "run") if r["kind"] == "event"]
    assert events[-1] == "interrupted"


@pytest.mark.slow
def test_second_signal_exits_immediately(tmp_path: Path) -> None:
    process = start(write_config(tmp_path, steps=100_000), tmp_path / "run")
    wait_for_step(tmp_path / "run", 5, process)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=3)
    while not checkpoints.steps():  # saved in the background: what is not committed yet is rightly lost
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)  # both signals are there before the process can act on the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=600)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert open_state(tmp_path / "run", "latest")[2] >= 3


def interrupted_equals_uninterrupted(tmp_path: Path, steps: int, n: int, seed: int) -> None:
    config = write_config(tmp_path, steps)
    whole = start(config, tmp_path / "whole")
    _, words = whole.communicate(timeout=600)
    assert whole.returncode == 0, words
    draw = random.Random(seed)
    run, done = tmp_path / "run", 0
    while True:
        process = start(config, run)
        if done < n:
            last = max((r["step"] for r in read_metrics(run)), default=0) if run.exists() else 0
            wait_for_step(run, last + draw.randrange(1, max(2, steps // n)), process)
            time.sleep(draw.random() * 0.05)
            process.send_signal(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            done += 1
        _, words = process.communicate(timeout=600)
        if process.returncode == 0:
            break
        assert process.returncode in (-signal.SIGKILL, 75), words
    assert done >= 1
    same_bits(run, tmp_path / "whole")


@pytest.mark.trial
def test_three_interruptions_equal_none(tmp_path: Path) -> None:
    interrupted_equals_uninterrupted(tmp_path, steps=60, n=3, seed=1)


@pytest.mark.trial
def test_ten_random_interruptions_equal_none(tmp_path: Path) -> None:
    """200 steps, a checkpoint every third of them, killed ten times, mostly by SIGKILL and often in mid-save."""
    interrupted_equals_uninterrupted(tmp_path, steps=200, n=10, seed=2)
