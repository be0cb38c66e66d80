"""Replica processes: start, health checks, restart with backoff, rolling replacement, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from linnet.parallel.cluster.environment import PROCESSES
from linnet.serve.replicas import upstream

SOCKET = "LINNET_REPLICA_SOCKET"
"""Environment variable that makes a server a replica listening on this socket. It drains when its standard input is closed, which
happens when the front exits for any reason."""
READY_POLL_SECONDS = 0.05
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before a dead replica is restarted; the delay doubles until one stays up for `STABLE_SECONDS`."""
STABLE_SECONDS = 60.0
EXIT_SECONDS = 1.0
PROBE_SECONDS = 5.0
"""Interval of the liveness probes."""
MAX_MISSED_PROBES = 4
"""Consecutive failed probes before a replica is killed: a hung one would hold its calls and their sessions forever."""
STOP_SECONDS = 10.0
"""Extra time after the drain for a replica to exit."""


class ReplicaStartError(Exception):
    """The first replica exited before it was ready, and has printed the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the replica exited with code {code}")
        self.code = code


class Replica:
    """One replica process."""

    def __init__(self, number: int, process: Process, socket: Path) -> None:
        self.number, self.process, self.socket = number, process, socket
        self.n_running = 0
        """Calls forwarded to it that have not ended."""
        self.n_calls = 0
        self.n_missed = 0
        """Consecutive failed probes."""
        self.is_retired = False
        """It is expected to exit, because it was replaced or the fleet is stopping."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.n_running += 1
        self.n_calls += 1
        try:
            yield
        finally:
            self.n_running -= 1

    async def wait_ready(self) -> bool:
        """Wait until it is ready. Returns False if it exited first."""
        while self.process.returncode is None:
            if await upstream.is_ready(self.socket):
                return True
            await asyncio.sleep(READY_POLL_SECONDS)
        return False

    async def wait_exit(self) -> None:
        """After a lost connection, wait for the process to exit, so that it holds no session locks, or for `EXIT_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), EXIT_SECONDS)

    async def wait_hung(self) -> None:
        """Probe the replica, and return once it is considered hung."""
        while self.n_missed < MAX_MISSED_PROBES:
            await asyncio.sleep(PROBE_SECONDS)
            self.n_missed = 0 if await upstream.is_alive(self.socket) else self.n_missed + 1

    def retire(self) -> None:
        self.is_retired = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Fleet:
    """A fixed number of replicas. An entry of `replicas` is None while its process is being started."""

    def __init__(self, n: int, command: Callable[[int], Sequence[str]], folder: Path) -> None:
        """`command(i)` returns the command line of replica i; `folder` contains only their sockets."""
        self._command, self._folder = command, folder
        self.replicas: list[Replica | None] = [None] * n
        self.n_restarts = 0
        self._n_started = 0
        self._processes: set[Replica] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling = asyncio.Lock()
        self._is_stopping = False

    @property
    def ready(self) -> list[Replica]:
        return [one for one in self.replicas if one is not None]

    def choose(self, tried: Collection[Replica] = ()) -> Replica | None:
        """Return the replica with the fewest running calls, then the fewest in total. One that missed a probe is the last resort."""
        free = [one for one in self.ready if one not in tried and one.process.returncode is None]
        return min(free, key=lambda one: (one.n_missed > 0, one.n_running, one.n_calls), default=None)

    async def start(self) -> None:
        """Start the first replica and return when it is ready. The others then start in the background and reuse its compilation
        cache on disk."""
        first = await self._launch(0)
        if not await first.wait_ready():
            raise ReplicaStartError(await first.process.wait())
        self._install(first)
        for number in range(1, len(self.replicas)):
            self._background(self._fill(number, FIRST_DELAY))

    async def replace_all(self) -> None:
        """Replace the replicas one at a time. Running calls finish, and new ones go to other replicas."""
        async with self._rolling:
            for number, old in enumerate(list(self.replicas)):
                if old is None or self._is_stopping:
                    continue  # one that is missing is being started anyway
                new = await self._launch(number)
                if not await new.wait_ready():
                    _log(f"The new replica {number} {_exit_description(new.process)}; the old replicas keep running.")
                    return
                old.retire()
                self._install(new)
                _log(f"Replica {number} was replaced.")

    def replace_all_soon(self) -> None:
        self._background(self.replace_all())

    async def stop(self, within: float) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # no replica is started after this
        for replica in self._processes:
            replica.retire()
        exits = [replica.process.wait() for replica in self._processes]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*exits), within + STOP_SECONDS)
        for replica in self._processes:
            replica.signal(signal.SIGKILL)
            await replica.process.wait()

    async def _fill(self, number: int, delay: float) -> None:
        """Start a missing replica, retrying until it is ready."""
        while not self._is_stopping:
            replica = await self._launch(number)
            if await replica.wait_ready():
                self._install(replica, delay)
                return
            if not self._is_stopping:
                _log(
                    f"Replica {number} {_exit_description(replica.process)} before it was ready; retrying in {delay:g} s."
                )
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)

    def _install(self, replica: Replica, delay: float = FIRST_DELAY) -> None:
        self.replicas[replica.number] = replica
        self._background(self._watch(replica, delay))

    async def _watch(self, replica: Replica, delay: float) -> None:
        started = time.monotonic()
        watchdog = asyncio.create_task(self._kill_if_hung(replica))
        try:
            await replica.process.wait()
        finally:
            watchdog.cancel()
        self._processes.discard(replica)
        if replica.is_retired or self._is_stopping:
            return
        self.replicas[replica.number] = None
        self.n_restarts += 1
        delay = FIRST_DELAY if time.monotonic() - started > STABLE_SECONDS else delay
        _log(f"Replica {replica.number} {_exit_description(replica.process)}; restarting in {delay:g} s.")
        await asyncio.sleep(delay)
        await self._fill(replica.number, min(2 * delay, MAX_DELAY))

    async def _kill_if_hung(self, replica: Replica) -> None:
        await replica.wait_hung()
        if not replica.is_retired:  # a retired one gets no calls and exits after its drain
            _log(f"Replica {replica.number} hangs: it missed {MAX_MISSED_PROBES} health probes and is killed.")
            replica.signal(signal.SIGKILL)

    async def _launch(self, number: int) -> Replica:
        self._n_started += 1
        socket = self._folder / f"{self._n_started}.sock"
        # A replica is a single process, even if the front was started as one task of a multi-process job.
        environment = {**os.environ, SOCKET: str(socket), PROCESSES: "1"}
        # A new process session, so that Ctrl-C reaches only the front, which then drains.
        process = await asyncio.create_subprocess_exec(
            *self._command(number), stdin=PIPE, env=environment, start_new_session=True
        )
        replica = Replica(number, process, socket)
        self._processes = {one for one in self._processes if one.process.returncode is None} | {replica}
        return replica

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _exit_description(process: Process) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
