"""One process of several is killed, stopped or slow: the others say who, stop within the bound, and continue exactly after a restart.

The processes of the first tests are started by hand, without `linnet launch`, as on machines of a real cluster: no one but they
themselves can find out that one is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_processes import LOST_SECONDS, PROGRAM, Processes, is_alive, killed_equals_uninterrupted, started, until


@pytest.mark.trial
@pytest.mark.parametrize("victim", [0, 2])
def test_process_suspended_for_long_counts_as_lost(victim: int, tmp_path: Path) -> None:
    with Processes(tmp_path, 3) as processes:
        processes.wait_for_step(5)
        processes.signal(victim, signal.SIGSTOP)
        processes.others_stop(victim, within=2 * LOST_SECONDS + 5)


@pytest.mark.trial
def test_briefly_suspended_process_is_logged_and_the_run_continues(tmp_path: Path) -> None:
    with Processes(tmp_path, 3, steps=600, lost=12.0) as processes:
        processes.wait_for_step(5)
        processes.signal(1, signal.SIGSTOP)
        processes.wait_for_output(0, "Waiting for process 1 on ", 15)
        processes.signal(1, signal.SIGCONT)
        assert processes.codes(within=120) == [0, 0, 0]
        assert "and has recovered" in processes.said(0)


@pytest.mark.trial
def test_slow_host_is_named_in_the_log(tmp_path: Path) -> None:
    with Processes(tmp_path, 3, steps=300, lost=12.0, slow=(2, 0.06)) as processes:
        assert processes.codes(within=180) == [0, 0, 0]
        assert "Process 2 on " in processes.said(0)
        assert "is slow: its host work" in processes.said(0)


@pytest.mark.trial
def test_processes_of_a_launcher_that_was_killed_end_too(tmp_path: Path) -> None:
    around = (
        "import sys\nfrom linnet.cli import launch\nfrom linnet.cli.dispatch import main\n"
        f"launch.COMMAND = [sys.executable, {str(PROGRAM)!r}]\n"
        f"main(['launch', '--processes', '2', '--', {str(tmp_path)!r}, '100000'])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", around])
    pids = started(tmp_path, 2)
    launcher.kill()
    launcher.wait()
    until(lambda: not any(map(is_alive, pids)), 15, lambda: f"{pids} still run")


@pytest.mark.trial
def test_failed_process_is_reported_with_its_reason_and_exit_code(tmp_path: Path) -> None:
    around = (
        "import sys\nfrom linnet.cli import launch\nfrom linnet.cli.dispatch import main\n"
        f"launch.COMMAND, launch.GRACE_SECONDS = [sys.executable, {str(PROGRAM)!r}], 60.0\n"
        f"main(['launch', '--processes', '3', '--', {str(tmp_path)!r}, '100000'])"
    )
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen([sys.executable, "-c", around], stderr=said, stdout=said)
    started(tmp_path, 3)
    (tmp_path / "fail1").touch()
    assert launcher.wait(timeout=60) == 1
    words = (tmp_path / "said").read_text()
    assert "[2] Process 1 on " in words
    assert "failed: OSError: told to fail" in words


@pytest.mark.trial
def test_twenty_random_kills_of_four_processes_change_nothing(tmp_path: Path) -> None:
    """In mid-step, in mid-save and while starting."""
    killed_equals_uninterrupted(tmp_path, processes=4, steps=120, kills=20, seed=7, evaluated=True)
