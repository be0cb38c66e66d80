"""`linnet launch`: run a command in several local processes, as one cluster over the loopback interface."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

from linnet.cli.parse import parse
from linnet.core.errors import UserError, invalid
from linnet.parallel.cluster.environment import COORDINATOR, LAUNCHER, PROCESS_ID, PROCESSES
from linnet.parallel.cluster.exit import EXIT_PEER_LOST

DESCRIPTION = """Run a linnet command in several local processes, as one cluster: linnet launch --processes 4 -- train quickstart.

The output of process 0 is shown as it is; lines of the others are prefixed with their process index. The first Ctrl-C or SIGTERM is
forwarded to all processes, which save a checkpoint and stop; the second kills them. The exit code is that of the process that failed
first."""

COMMAND = [sys.executable, "-c", "from linnet.cli import main; main()"]
GRACE_SECONDS = 2.0
"""Time for the other processes to exit by themselves after one has failed; they cannot continue without it."""
HURRY_SECONDS = 5.0
"""Time to exit after the second signal."""
POLL_SECONDS = 0.05
NOT_RESTARTED = (0, 2, 3, 75)
"""Exit codes after which a restart would not help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    processes: int
    """Number of processes."""
    devices_per_process: int | None = None
    """Number of CPU devices per process. Default: 1."""
    restarts: int = 0
    """Maximum number of restarts of all processes after one is lost. The run resumes from its last complete checkpoint."""


def launch_command(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    flags, command = parse(Flags, argv[:end], "launch", DESCRIPTION), argv[end + 1 :]
    _check(flags, command)
    with _Signals() as signals:
        for restart in range(flags.restarts + 1):
            code = _Cluster(flags, command, signals).run()
            if code in NOT_RESTARTED or signals.count or restart == flags.restarts:
                return code
            _log(f"Restart {restart + 1} of {flags.restarts}: all {flags.processes} processes are started again.")
    raise AssertionError("unreachable: the last restart returns")


def _check(flags: Flags, command: list[str]) -> None:
    if not command:
        raise UserError(
            "launch needs a command after `--`. Fix: use `linnet launch --processes 4 -- train quickstart`."
        )
    if command[0] == "launch":
        raise invalid("COMMAND", "launch", "another command", "name the command that the processes run, such as train")
    if flags.processes < 1:
        raise invalid("--processes", flags.processes, "at least 1", "use 2")
    if flags.devices_per_process is not None and flags.devices_per_process < 1:
        raise invalid("--devices-per-process", flags.devices_per_process, "at least 1", "use 1")
    if flags.restarts < 0:
        raise invalid("--restarts", flags.restarts, "0 or more", "use 0")


class _Signals:
    """Counts SIGINT and SIGTERM while the cluster runs. The processes are in their own sessions, so a terminal's Ctrl-C reaches only
    the launcher."""

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGTERM

    def __enter__(self) -> _Signals:
        self._old = {number: signal.signal(number, self._count) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.count, self.last = self.count + 1, signal.Signals(number)


class _Cluster:
    """One run of all processes. It ends when all have exited, or soon after the first failure."""

    def __init__(self, flags: Flags, command: list[str], signals: _Signals) -> None:
        self.flags, self.command, self.signals = flags, command, signals
        self.n_forwarded = 0
        self.first_failed: tuple[int, int] | None = None  # process index and exit code
        self.kill_at = float("inf")

    def run(self) -> int:
        address = f"127.0.0.1:{_free_port()}"
        processes: list[subprocess.Popen[str]] = []
        for i in range(self.flags.processes):
            with _on_its_cores(i, self.flags.processes):
                processes.append(self._start(i, address))
        readers = [
            reader for i, process in enumerate(processes) if i for reader in _read(i, process.stdout, process.stderr)
        ]
        try:
            while any(process.poll() is None for process in processes):
                self._watch(processes)
                time.sleep(POLL_SECONDS)
            self._watch(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for reader in readers:
            reader.join()
        return 0 if self.first_failed is None else self.first_failed[1]

    def _start(self, i: int, address: str) -> subprocess.Popen[str]:
        environ = dict(os.environ) | {
            COORDINATOR: address,
            PROCESSES: str(self.flags.processes),
            PROCESS_ID: str(i),
            LAUNCHER: str(os.getpid()),
        }
        if self.flags.devices_per_process is not None:
            environ["JAX_NUM_CPU_DEVICES"] = str(self.flags.devices_per_process)
        pipe = None if i == 0 else subprocess.PIPE
        return subprocess.Popen(
            [*COMMAND, *self.command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _watch(self, processes: list[subprocess.Popen[str]]) -> None:
        """Forward signals, record the first failure, and kill processes that do not exit after it."""
        if self.signals.count > self.n_forwarded:
            self.n_forwarded = self.signals.count
            for process in processes:
                process.send_signal(self.signals.last)
            if self.n_forwarded > 1:
                self.kill_at = min(self.kill_at, time.monotonic() + HURRY_SECONDS)
        codes = [(i, _exit_code(process)) for i, process in enumerate(processes) if process.poll() is not None]
        failed = [(i, code) for i, code in codes if code]
        if failed and self.first_failed is None:
            self.first_failed = first_failure(failed)
            left = len(processes) - len(codes)
            if left and self.first_failed[1] != 75:
                i, code = self.first_failed
                others = "the other one is" if left == 1 else f"the other {left} are"
                _log(f"Process {i} {_describe_exit(code)}: {others} stopped within {GRACE_SECONDS:g} s.")
                self.kill_at = min(self.kill_at, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > self.kill_at:
            for process in processes:
                process.kill()


def first_failure(failed: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the first failure among processes found failed at the same time: preferably one that does not report a lost peer."""
    return min(failed, key=lambda one: one[1] == EXIT_PEER_LOST)


@contextlib.contextmanager
def _on_its_cores(i: int, n: int) -> Iterator[None]:
    """Bind processes started in this block to their cores (Linux only). Otherwise each process would start threads for
    all cores, and updates would take 1.5 to 2 times as long."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, process_cores(sorted(cores), i, n))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def process_cores(cores: list[int], i: int, n: int) -> list[int]:
    """Return the cores of process `i` of `n`: an equal part, or one shared core if there are more processes than cores."""
    if n >= len(cores):
        return [cores[i % len(cores)]]
    return cores[i * len(cores) // n : (i + 1) * len(cores) // n]


def _exit_code(process: subprocess.Popen[str]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _describe_exit(code: int) -> str:
    try:
        return f"was ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"ended with exit code {code}"


def _free_port() -> int:
    """Return a free port. If another program takes it before process 0 does, the start fails with an error."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _read(i: int, out: IO[str] | None, err: IO[str] | None) -> list[threading.Thread]:
    """Start threads that forward the output of a process line by line, prefixed with its index."""

    def forward(source: IO[str], to: IO[str]) -> None:
        with source:
            for line in source:
                # If the reader of stdout has exited, the process must still not block on a full pipe.
                with contextlib.suppress(OSError):
                    print(f"[{i}] {line}", end="", file=to, flush=True)

    pairs = [(source, to) for source, to in ((out, sys.stdout), (err, sys.stderr)) if source is not None]
    threads = [threading.Thread(target=forward, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _log(message: str) -> None:
    print(f"linnet launch: {message}", file=sys.stderr, flush=True)
