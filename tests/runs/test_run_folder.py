"""The run folder's lock: one training at a time, nothing stale after SIGKILL, readers never shut out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from linnet.core.errors import UserError
from linnet.runs.folder import RunFolder

HOLD = """
import sys, time
from pathlib import Path
from linnet.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_paths_are_the_documented_ones(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create()
    names = [p.relative_to(run.path).as_posix() for p in (run.config, run.metrics, run.checkpoints, run.samples)]
    assert names == ["config.json", "metrics.jsonl", "checkpoints", "samples"]
    assert run.report.name == "report.html"
    assert run.checkpoints.is_dir()
    assert run.samples.is_dir()


def test_folder_that_cannot_be_made_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run is .*Fix: give another folder"):
        RunFolder(tmp_path / "file" / "run").create()


def test_second_lock_in_one_process_is_rejected_and_the_first_stays(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.lock():
        for _ in range(2):
            with pytest.raises(UserError, match=f"process {os.getpid()} on .*Fix: "), run.lock():
                pass
    with run.lock():
        pass


def test_lock_is_released_when_training_raises(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock():
        pass


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            with (
                pytest.raises(UserError, match=rf"process {child.pid} on .*kill {child.pid}"),
                RunFolder(tmp_path).lock(),
            ):
                pass
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            with RunFolder(tmp_path).lock():
                pass
        finally:
            child.kill()
