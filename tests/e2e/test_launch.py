"""`linnet launch` around small programs: what they say, how they end, signals, restarts. Then around real training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_processes import LOST_SECONDS, Processes, killed_equals_uninterrupted
from waiting import PATIENCE, until

from linnet.cli import launch
from linnet.cli.dispatch import main

HEAD = "import os, signal, sys, time\nfrom pathlib import Path\nme = int(os.environ['LINNET_PROCESS_ID'])\nhere = Path(sys.argv[1])\n"
Launched = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launched:
    """Launches a program in place of linnet: exit code, and what was said."""

    def run(program: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(launch, "COMMAND", [sys.executable, "-c", HEAD + program])
        with pytest.raises(SystemExit) as exit:
            main(["launch", *flags, "--", str(tmp_path)])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run


def test_output_lines_start_with_the_process_index(launched: Launched) -> None:
    program = "print('hello', os.environ['LINNET_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'])\nprint('oh', file=sys.stderr)"
    code, out, err = launched(program, "--processes", "3", "--devices-per-process", "2")
    assert code == 0
    assert sorted(out.splitlines()) == ["[1] hello 3 2", "[2] hello 3 2", "hello 3 2"]
    assert sorted(err.splitlines()) == ["[1] oh", "[2] oh", "oh"]


def test_all_processes_get_one_coordinator_and_their_part_of_the_cores(launched: Launched) -> None:
    program = "print(os.environ['LINNET_COORDINATOR'], sorted(os.sched_getaffinity(0)))"
    mine = os.sched_getaffinity(0)
    _, out, _ = launched(program, "--processes", "2")
    output = [line.removeprefix("[1] ").split(" ", 1) for line in out.splitlines()]
    assert output[0][0] == output[1][0]
    assert output[0][0].startswith("127.0.0.1:")
    if len(mine) > 1:
        assert output[0][1] != output[1][1]
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("code", [2, 3])
def test_failure_that_restarts_do_not_fix_ends_all_with_its_exit_code(code: int, launched: Launched) -> None:
    program = f"(here / f'start{{me}}').open('a').write('x')\nsys.exit({code}) if me == 1 else time.sleep(3600)"
    found, _, err = launched(program, "--processes", "3", "--restarts", "5")
    assert found == code
    assert f"Process 1 ended with exit code {code}: the other 2 are stopped" in err
    assert "Restart" not in err


def test_killed_process_restarts_the_job_at_most_restarts_times(launched: Launched, tmp_path: Path) -> None:
    program = """
starts = here / f'starts{me}'
with starts.open('a') as file: file.write('x')
if me == 1 and len(starts.read_text()) < 3: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if len(starts.read_text()) == 3 else 3600)
"""
    code, _, err = launched(program, "--processes", "2", "--restarts", "2")
    assert code == 0
    assert err.count("was ended by SIGKILL") == 2
    assert "Restart 2 of 2" in err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"starts0": "xxx", "starts1": "xxx"}
    for path in tmp_path.iterdir():
        path.unlink()
    assert launched(program, "--processes", "2", "--restarts", "1")[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--processes", "0", "--", "train"], "--processes"),
        (["--processes", "2"], "--"),
        (["--processes", "2", "--", "launch"], "launch"),
        (["--processes", "2", "--devices-per-process", "0", "--", "train"], "--devices-per-process"),
        (["--processes", "2", "--restarts", "-1", "--", "train"], "--restarts"),
    ],
)
def test_invalid_launches_are_rejected(flags: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["launch", *flags])
    assert exit.value.code == 2
    assert named in capfd.readouterr().err


@pytest.mark.parametrize(("n_signal", "code"), [(1, 75), (2, 128 + signal.SIGTERM), (3, 128 + signal.SIGKILL)])
def test_signals_are_forwarded_and_never_cause_a_restart(n_signal: int, code: int, tmp_path: Path) -> None:
    """The first asks to save, the second to end at once; who does not even hear that is killed."""
    program = f"""
heard = 0
def hear(number, frame):
    global heard
    heard += 1
    (here / f'heard{{me}}-{{heard}}').touch()
    if heard == min({n_signal}, 2) and {n_signal} < 3: os._exit(75 if heard == 1 else 128 + number)
signal.signal(signal.SIGTERM, hear)
(here / f'ready{{me}}').touch()
while True: time.sleep(0.1)
"""
    around = (
        "import sys\nfrom linnet.cli import launch\nfrom linnet.cli.dispatch import main\n"
        f"launch.COMMAND, launch.HURRY_SECONDS = [sys.executable, '-c', {HEAD + program!r}], 1.0\n"
        f"main(['launch', '--processes', '2', '--restarts', '3', '--', {str(tmp_path)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", around], stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / f"ready{i}").exists() for i in range(2)):
        assert process.poll() is None
        time.sleep(0.02)
    for n in range(1, min(n_signal, 2) + 1):
        process.send_signal(signal.SIGTERM)
        until(lambda n=n: all((tmp_path / f"heard{i}-{n}").exists() for i in range(2)))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert "Restart" not in err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_detect_a_killed_process(victim: int, tmp_path: Path) -> None:
    """Without a launcher, as on machines of their own; process 0 is the one that keeps them together."""
    with Processes(tmp_path, 3) as processes:
        processes.wait_for_step(5)
        processes.signal(victim, signal.SIGKILL)
        processes.others_stop(victim, within=LOST_SECONDS + 6)


@pytest.mark.slow
def test_two_kills_of_a_run_of_two_processes_change_nothing(tmp_path: Path) -> None:
    """`tests/trials/test_faults.py` has twenty of four."""
    killed_equals_uninterrupted(tmp_path, processes=2, steps=30, kills=2, seed=3, evaluated=False)
