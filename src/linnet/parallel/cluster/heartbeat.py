"""Heartbeat: every process reports its status, and process 0 decides which process is lost.

The coordination service of JAX (0.10) has a heartbeat of its own, which stays on as a fallback with three times Linnet's timeout. It
ends every process when one is lost, but it cannot replace this one:

- It ends a process with C's abort() and a stack trace: exit code 134, without giving Python control. The callback that would replace
  the abort is not available through `jax.distributed.initialize`.
- Its message has the index of a lost process, but neither host, step nor last checkpoint. If process 0 is lost or suspended, it only
  reports a failed RPC. The reason why a process failed by itself is not passed on.
- It does nothing before its timeout: there is no warning about a late process, and no shorter timeout when a broken connection has
  already shown that the run cannot continue.

The straggler log needs regular status messages in any case; detecting a lost process adds a comparison of their sequence numbers.

The messages are stored in the key-value store of the coordination service, which runs in process 0. Each process writes its own and
reads one verdict; only process 0 reads all of them, so that a thousand processes cost it a thousand short messages per interval.
Process 0 counts as lost when its store stops answering. Time in which this process itself was suspended is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from linnet.parallel.cluster.environment import LAUNCHER, Member, Timeouts

BEATS, VERDICT = "linnet/beats/", "linnet/verdict/"
FAILED_SECONDS = 5.0
"""Grace period after a process reports a failure, so that peers hitting the same error can report it too."""
PROBE, PROBE_REPEATS, N_PROBES = bytes(1 << 20), 16, 15
"""A probe takes some milliseconds of one core, longer than a scheduler time slice, so that it detects both oversubscribed and slow
cores."""
FIX = "Fix: start the same command again in all processes (`linnet launch --restarts N` does so automatically)."


class Store(Protocol):
    """The methods used of JAX's coordination service client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """The status that a process reports with every heartbeat."""

    index: int
    host: str
    sequence: int
    """Increases with every heartbeat."""
    step: int | None = None
    host_seconds: float | None = None
    """Median host time per step, mostly spent on making the batch."""
    probe_seconds: float | None = None
    """Median time of the CPU probe, a fixed amount of work for one core."""
    broken: bool = False
    """Whether the process has lost a connection to a peer, so that the run cannot continue."""
    failed: str | None = None
    """Why the process exits, if it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissedBeats:
    index: int
    seconds: float
    """Time since the last new heartbeat."""
    last: Beat | None

    @property
    def host(self) -> str:
        return f" on {self.last.host}" if self.last else ""

    @property
    def step(self) -> str:
        return f", last seen at step {self.last.step}" if self.last and self.last.step is not None else ""

    def __str__(self) -> str:
        return f"process {self.index}{self.host} (no heartbeat for {self.seconds:.0f} s{self.step})"


class FailureDetector:
    """Tracks on process 0 when each process last sent a new heartbeat, on a clock that excludes suspensions of this process."""

    def __init__(self, count: int) -> None:
        self.beats: dict[int, Beat] = {}
        self._received = dict.fromkeys(range(count), 0.0)
        self._failed: dict[int, float] = {}
        self._now = 0.0

    def update(self, beats: list[Beat], elapsed: float) -> None:
        """Record the current heartbeats. `elapsed`: seconds since the last call, without suspensions of this process."""
        self._now += elapsed
        for beat in beats:
            last = self.beats.get(beat.index)
            if last is None or beat.sequence != last.sequence:
                self._received[beat.index] = self._now
            if beat.failed is not None:
                self._failed.setdefault(beat.index, self._now)
            self.beats[beat.index] = beat

    def missed(self, timeout: float) -> list[MissedBeats]:
        """Return the processes without a new heartbeat for more than `timeout` seconds, the longest first."""
        late = [
            MissedBeats(index=index, seconds=self._now - received, last=self.beats.get(index))
            for index, received in self._received.items()
            if self._now - received > timeout
        ]
        return sorted(late, key=lambda each: -each.seconds)

    def verdict(self, timeout: float, timeout_if_broken: float) -> str | None:
        """Return a message that names the failed or lost processes, or None. After a broken connection a shorter timeout applies."""
        for index, since in self._failed.items():
            if self._now - since >= min(FAILED_SECONDS, timeout):
                return f"Process {index} on {self.beats[index].host} failed: {self.beats[index].failed}"
        is_broken = any(beat.broken for beat in self.beats.values())
        missed = self.missed(min(timeout, timeout_if_broken) if is_broken else timeout)
        lost = [each for each in missed if each.index not in self._failed]  # the failed are reported above
        if not lost:
            return None
        return f"Lost: {'; '.join(map(str, lost[:3]))}{'; and more' if len(lost) > 3 else ''}."


class Heartbeat:
    """The heartbeat threads of a process: one sends and reads heartbeats, the other times out the coordinator."""

    def __init__(
        self, store: Store, member: Member, timeouts: Timeouts, coordinator: str, exit: Callable[[str, float], Any]
    ) -> None:
        """`exit(message, delay)` prints the message and exits the process `delay` seconds later."""
        self._store, self._coordinator, self._exit = store, coordinator, exit
        self.member, self.timeouts = member, timeouts
        self.detector = FailureDetector(member.count)
        self.on_late: Callable[[list[MissedBeats]], None] | None = None
        """Called by process 0 at every beat with the processes whose heartbeat is late, but not yet timed out."""
        self.describe_saved: Callable[[], str] = lambda: ""
        """Returns a sentence about the last saved checkpoint, for the exit message."""
        self.interval = min(1.0, timeouts.lost / 6)
        self.late_seconds = max(2 * self.interval, timeouts.lost / 6)
        self.broken = False
        """Reported to the peers: this process lost a connection, so that the run cannot continue."""
        self._sequence, self._unanswered = 0, 0.0
        self._step: int | None = None
        self._failed: str | None = None
        self._host_seconds: deque[float] = deque(maxlen=N_PROBES)
        self._probes: deque[float] = deque(maxlen=N_PROBES)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("heartbeat", self._beat_until_stopped), ("coordinator-timeout", self._time_out))
        ]

    def start(self) -> Heartbeat:
        self._send()  # sent first, so that a lost process can be reported with its host name
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.interval + 1.0)

    def stepped(self, step: int, host_seconds: float) -> None:
        """Record an update, to be reported with the next heartbeat."""
        self._step = step
        self._host_seconds.append(host_seconds)

    def fail(self, reason: str) -> None:
        """Report to the peers that this process exits, and why."""
        self._failed = reason
        self._sequence += 1
        self._send()

    def exit_message(self, cause: str) -> str:
        return " ".join(part for part in (cause, "This process stops.", self.describe_saved(), FIX) if part)

    def coordinator_lost_message(self) -> str:
        step = f", at step {self._step}" if self._step is not None else ""
        return self.exit_message(f"Lost: process 0 at {self._coordinator} (it does not answer{step}).")

    def _beat_until_stopped(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self.interval):
            self._sequence += 1
            self._probe()
            try:
                self._send()
                verdict = self._read_verdict(min(time.monotonic() - last, 3 * self.interval))
            except Exception:  # any error: if the store stays unreachable, the other thread exits this process in time
                continue
            finally:
                last = time.monotonic()
            self._unanswered = 0.0
            if verdict is not None and not self._stop.is_set():
                # The store ends with process 0, so process 0 waits until the others have had time to read the verdict.
                self._exit(self.exit_message(verdict), 2.5 * self.interval if self.member.index == 0 else 0.0)

    def _send(self) -> None:
        beat = Beat(
            index=self.member.index,
            host=self.member.host,
            sequence=self._sequence,
            step=self._step,
            host_seconds=_median(self._host_seconds),
            probe_seconds=_median(self._probes) if len(self._probes) == N_PROBES else None,  # fewer are too noisy
            broken=self.broken,
            failed=self._failed,
        )
        self._store.key_value_set(f"{BEATS}{beat.index}", json.dumps(dataclasses.asdict(beat)), allow_overwrite=True)

    def _read_verdict(self, elapsed: float) -> str | None:
        """Return the verdict of process 0. Process 0 itself makes it, and writes it for the others."""
        if self.member.index != 0:
            return next((message for _, message in self._store.key_value_dir_get(VERDICT)), None)
        self.detector.update([Beat(**json.loads(text)) for _, text in self._store.key_value_dir_get(BEATS)], elapsed)
        verdict = self.detector.verdict(self.timeouts.lost, 4 * self.interval)
        if verdict is not None:
            self._store.key_value_set(f"{VERDICT}0", verdict, allow_overwrite=True)
        elif self.on_late is not None:
            self.on_late(self.detector.missed(self.late_seconds))
        return verdict

    def _time_out(self) -> None:
        """Exit this process if the store does not answer, or if the launcher is gone."""
        while not self._stop.wait(self.interval):
            self._unanswered += self.interval  # not wall time: suspensions of this process must not count
            if self._unanswered > self.timeouts.lost and not self._stop.is_set():
                self._exit(self.coordinator_lost_message(), 0.0)
            if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
                self._exit("`linnet launch` has ended, so this process stops.", 0.0)

    def _probe(self) -> None:
        start = time.perf_counter()
        for _ in range(PROBE_REPEATS):
            zlib.crc32(PROBE)
        self._probes.append(time.perf_counter() - start)


def _median(values: deque[float]) -> float | None:
    return statistics.median(list(values)) if values else None
