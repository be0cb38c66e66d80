"""Several processes, as a user or a cluster's scheduler starts them, and what may happen to them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import run_comparison
import tiny
from compiler_flags import QUICKLY

from linnet.config import codec
from linnet.runs.load import open_state
from linnet.runs.metrics import read_metrics

PROGRAM = Path(__file__).with_name("cluster_program.py")
LINNET = [sys.executable, "-c", "from linnet.cli import main; main()"]
LOST_SECONDS = 4.0


class Processes:
    """`cluster_program.py`, so many times, with no one above them."""

    def __init__(
        self,
        folder: Path,
        n: int,
        steps: int = 100_000,
        lost: float = LOST_SECONDS,
        slow: tuple[int, float] | None = None,
    ) -> None:
        self.folder, self.n = folder, n
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        arguments = [str(folder), str(steps), *map(str, slow or ())]
        self.processes: list[subprocess.Popen[bytes]] = []
        for i in range(n):
            environ = dict(os.environ) | {
                "LINNET_COORDINATOR": f"127.0.0.1:{port}",
                "LINNET_PROCESSES": str(n),
                "LINNET_PROCESS_ID": str(i),
                "LINNET_LOST_SECONDS": str(lost),
            }
            with (folder / f"said{i}").open("wb") as said:
                command = [sys.executable, str(PROGRAM), *arguments]
                self.processes.append(subprocess.Popen(command, env=environ, stdout=said, stderr=subprocess.STDOUT))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self, i: int) -> str:
        return (self.folder / f"said{i}").read_text()

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        until(lambda: all(self._step(i) >= step for i in range(self.n)), seconds, self._everything)

    def wait_for_output(self, i: int, words: str, seconds: float) -> None:
        until(lambda: words in self.said(i), seconds, self._everything)

    def signal(self, i: int, number: signal.Signals) -> None:
        self.processes[i].send_signal(number)

    def codes(self, within: float) -> list[int]:
        end = time.monotonic() + within
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def others_stop(self, victim: int, within: float) -> None:
        """Each with the exit code and the sentence that tell of the victim."""
        asked = time.monotonic()
        for i, process in enumerate(self.processes):
            if i != victim:
                assert process.wait(max(0.1, asked + within - time.monotonic())) == 76, self.said(i)
                words = self.said(i)
                assert f"process {victim} " in words, words
                assert "Updates after the last checkpoint, step 15, are lost." in words
                assert "--restarts" in words

    def _step(self, i: int) -> int:
        try:
            return int((self.folder / str(i)).read_text().split()[1])
        except FileNotFoundError:
            return 0

    def _everything(self) -> str:
        return "\n".join(f"process {i}: {self.said(i)}" for i in range(self.n))


def write_config(folder: Path, steps: int, evaluated: bool) -> Path:
    """`judged`: with evaluations and a last test, which take as long to compile as the updates."""
    changes = {"optim.steps": steps, "train.log_every": 1, "train.checkpoint_every": 3, "train.eval_every": 30}
    if not evaluated:
        changes |= {"data.validation_fraction": 0.0, "data.test_fraction": 0.0}
    cfg = tiny.config(tiny.corpus(folder), **changes)
    codec.save(cfg, folder / "config.json")
    return folder / "config.json"


def quickly_compiled() -> dict[str, str]:
    """On CPU only process 0 finds its programs in JAX's cache (the others have keys of their own, and never write), so
    every start compiles anew: most of a trial's time, and none of its matter."""
    return dict(os.environ) | {"XLA_FLAGS": QUICKLY}


class Launched:
    """`linnet launch ... train`, and its words in a file: a pipe that no one reads would stop it."""

    def __init__(self, config: Path, run: Path, processes: int, restarts: int) -> None:
        self.run, self.n, self._said = run, processes, run.with_suffix(".said")
        flags = ["--processes", str(processes), "--restarts", str(restarts)]
        train = ["train", str(config), "--out", str(run), "--quiet", "--mesh", f"data={processes}"]
        with self._said.open("wb") as said:
            command = [*LINNET, "launch", *flags, "--", *train]
            self.process = subprocess.Popen(command, env=quickly_compiled(), stdout=said, stderr=subprocess.STDOUT)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            for pid in self.children():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def finish(self) -> str:
        assert self.process.wait(timeout=600) == 0, self.said()
        return self.said()

    def last_step(self) -> int:
        return max((r["step"] for r in read_metrics(self.run) if r["kind"] == "train"), default=0)

    def children(self) -> list[int]:
        """Its processes, those that have ended left out."""
        found = []
        for task in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (task / "stat").read_text().rpartition(") ")[2].split()[:2]
                if task.name.isdecimal() and int(parent) == self.process.pid and state != "Z":
                    found.append(int(task.name))
        return sorted(found)

    def wait_until_started(self) -> None:
        self._until(lambda: len(self.children()) == self.n)

    def reached(self, step: int) -> None:
        self._until(lambda: self.last_step() >= step)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._until(lambda: pid not in self.children())

    def _until(self, true: Callable[[], bool]) -> None:
        """While it runs: if it ends first, there is nothing left to kill, and the trial tries less than it says."""

        def happened() -> bool:
            assert self.process.poll() is None, f"it ended too early: {self.said()}"
            return true()

        until(happened, 300, self.said)


def killed_equals_uninterrupted(
    folder: Path, *, processes: int, steps: int, kills: int, seed: int, evaluated: bool
) -> None:
    """The run that lost a process so many times, at random moments, against the one that lost none."""
    config = write_config(folder, steps, evaluated)
    with Launched(config, folder / "whole", processes, 0) as whole:
        whole.finish()
    draw = random.Random(seed)
    with Launched(config, folder / "run", processes, kills) as launched:
        for _ in range(kills):
            launched.wait_until_started()
            if draw.random() < 0.25:  # while it starts
                time.sleep(draw.random() * 3.0)
            else:  # in mid-step or in mid-save: with a checkpoint every third step, one is being written most of the time
                launched.reached(min(launched.last_step() + draw.randrange(1, max(2, steps // (kills + 1))), steps - 3))
                time.sleep(draw.random() * 0.1)
            launched.kill(draw.choice(launched.children()))
        words = launched.finish()
    assert len(re.findall(r"Restart \d+ of", words)) == kills, words
    same(folder / "run", folder / "whole", steps)


def same(run: Path, whole: Path, steps: int) -> None:
    """Every step once and in order, with the very figures and the very parameters of the whole run."""
    logged = [r["step"] for r in read_metrics(run) if r["kind"] == "train"]
    assert logged == list(range(1, steps + 1))
    assert run_comparison.lines(run) == run_comparison.lines(whole)
    run_comparison.assert_same_bits(open_state(run, "latest")[1], open_state(whole, "latest")[1])


def started(folder: Path, n: int) -> list[int]:
    """The process ids of `cluster_program.py`, once all have made a step."""
    until(lambda: all((folder / str(i)).exists() for i in range(n)), 120, lambda: "no step was made")
    return [int((folder / str(i)).read_text().split()[0]) for i in range(n)]


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true: Callable[[], bool], seconds: float, words: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen in {seconds} s: {words()}"
        time.sleep(0.02)
