"""One process with four devices and four processes with one each are the same run; and it continues on two processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import mesh_runs
import pytest
import tiny
from compiler_flags import simulated

from linnet.config import codec

LINNET = [sys.executable, "-c", "from linnet.cli import main; main()"]
MORE = 2
LOSS, STATE = 1e-6, 2e-5


def linnet(*words: str, devices: int = 1) -> None:
    environment = simulated(devices, quickly=True)
    done = subprocess.run([*LINNET, *words], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def assert_same(a: Path, b: Path, n_step: int) -> None:
    """The loss curve to rounding, since gloo adds up in another order than one process's devices do; and the text to the byte."""
    assert list(mesh_runs.losses(b)) == list(range(1, n_step + 1))
    assert mesh_runs.losses(b) == pytest.approx(mesh_runs.losses(a), rel=LOSS, abs=0)
    assert mesh_runs.samples(b) == mesh_runs.samples(a)
    difference, name = mesh_runs.largest_difference(mesh_runs.weights(a), mesh_runs.weights(b))
    assert difference < STATE, f"{name} differs by {difference:.1e}"


@pytest.mark.slow
def test_four_processes_equal_one_with_four_devices_and_resume_as_two(tmp_path: Path) -> None:
    tiny.corpus(tmp_path)
    cfg = mesh_runs.config("one head", "", tmp_path / "corpus.txt")
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, accumulate=1))
    file = tmp_path / "run.json"
    codec.save(cfg, file)
    one, four = tmp_path / "one", tmp_path / "four"
    linnet("train", str(file), "--mesh", "data=2,model=2", "--out", str(one), "--quiet", devices=4)
    mesh = ("--mesh", "data=2,model=2")
    linnet("launch", "--processes", "4", "--", "train", str(file), *mesh, "--out", str(four), "--quiet")
    assert_same(one, four, mesh_runs.STEPS)

    longer = ("--optim.extra-steps", str(MORE), "--quiet")
    linnet("train", str(one), *longer, "--mesh", "")
    linnet("launch", "--processes", "2", "--", "train", str(four), *longer, "--mesh", "fsdp=2")
    assert_same(one, four, mesh_runs.STEPS + MORE)
