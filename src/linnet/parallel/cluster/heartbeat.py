"""Heartbeat: every process reports its progress, and process 0 decides which process is lost.

Heartbeats are stored in the key-value store of JAX's coordination service, which runs in process 0. Each process writes its own
beat and reads one verdict; only process 0 reads all beats, so that a thousand processes cost it a thousand short messages per
beat. Process 0 counts as lost when its store stops answering. Time in which this process itself was suspended is not counted.
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

SIGNS, VERDICT = "linnet/signs/", "linnet/verdict/"
FAILED_SECONDS = 5.0
"""Grace period after a process reports a failure, so that peers hitting the same error can report it too."""
PROBE, PROBE_TIMES, PROBES = bytes(1 << 20), 16, 15
"""A probe takes some milliseconds of one core, longer than a scheduler time slice, so that it detects both oversubscribed and slow
cores."""
FIX = "Fix: start the same command again in all processes (`linnet launch --restarts N` does it by itself)."


class Store(Protocol):
    """The methods used of JAX's coordination service client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """The status that a process reports with every heartbeat."""

    index: int
    host: str
    beat: int
    step: int | None = None
    host_seconds: float | None = None
    """Median host time per step, mostly spent on making the batch."""
    probe_seconds: float | None = None
    """Median time of the CPU probe, a fixed amount of work for one core."""
    broken: bool = False
    """Whether the process has lost a connection to a peer, so that the run cannot continue."""
    failed: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissedBeats:
    index: int
    seconds: float
    sign: Beat | None

    def __str__(self) -> str:
        host = f" on {self.sign.host}" if self.sign else ""
        step = f", last seen at step {self.sign.step}" if self.sign and self.sign.step is not None else ""
        return f"process {self.index}{host} (no sign of life for {self.seconds:.0f} s{step})"


class FailureDetector:
    """Tracks on process 0 when each process last sent a new heartbeat, on a clock that excludes suspensions of this process."""

    def __init__(self, count: int) -> None:
        self.signs: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(count), 0.0)
        self._failed: dict[int, float] = {}
        self._now = 0.0

    def hear(self, signs: list[Beat], awake: float) -> None:
        """Record new heartbeats. `awake` is the time in seconds since the last call, without suspensions of this process."""
        self._now += awake
        for sign in signs:
            before = self.signs.get(sign.index)
            if before is None or sign.beat != before.beat:
                self._heard[sign.index] = self._now
            if sign.failed is not None:
                self._failed.setdefault(sign.index, self._now)
            self.signs[sign.index] = sign

    def silent(self, longer_than: float) -> list[MissedBeats]:
        quiet = [
            MissedBeats(index=index, seconds=self._now - at, sign=self.signs.get(index))
            for index, at in self._heard.items()
            if self._now - at > longer_than
        ]
        return sorted(quiet, key=lambda one: -one.seconds)

    def verdict(self, lost: float, lost_if_broken: float) -> str | None:
        """Return a message that names the failed or lost processes, or None. After a broken connection a shorter timeout applies."""
        for index, at in self._failed.items():
            if self._now - at >= min(FAILED_SECONDS, lost):
                return f"Process {index} on {self.signs[index].host} failed: {self.signs[index].failed}"
        broken = any(sign.broken for sign in self.signs.values())
        silent = self.silent(min(lost, lost_if_broken) if broken else lost)
        gone = [one for one in silent if one.index not in self._failed]  # the failed are reported above
        if not gone:
            return None
        return f"Gone: {'; '.join(map(str, gone[:3]))}{'; and more' if len(gone) > 3 else ''}."


class Heartbeat:
    """The heartbeat threads of a process: one sends and reads heartbeats, the other times out the coordinator."""

    def __init__(
        self, store: Store, member: Member, bounds: Timeouts, coordinator: str, leave: Callable[[str, float], Any]
    ) -> None:
        """`leave(words, after)` prints `words` and exits the process `after` seconds later."""
        self._coordinator = coordinator
        self.member, self.bounds = member, bounds
        self.ears = FailureDetector(member.count)
        self.on_silence: Callable[[list[MissedBeats]], None] | None = None
        """Called by process 0 at every beat with the processes whose heartbeat is late, but not yet timed out."""
        self.saved: Callable[[], str] = lambda: ""
        """Returns a sentence about the last saved checkpoint, for the exit message."""
        self.every = min(1.0, bounds.lost / 6)
        self.late = max(2 * self.every, bounds.lost / 6)
        self._store, self._leave = store, leave
        self._beat, self._unanswered = 0, 0.0
        self._step: int | None = None
        self._failed: str | None = None
        self.broken = False
        """Reported to the peers: this process lost a connection, so that the run cannot continue."""
        self._host_seconds: deque[float] = deque(maxlen=PROBES)
        self._probes: deque[float] = deque(maxlen=PROBES)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("pulse", self._pulse), ("answers", self._count))
        ]

    def start(self) -> Heartbeat:
        self._tell()  # sent first, so that a lost process can be reported with its host name
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.every + 1.0)

    def stepped(self, step: int, host_seconds: float) -> None:
        self._step = step
        self._host_seconds.append(host_seconds)

    def fail(self, words: str) -> None:
        """Report to the peers that this process exits, and why."""
        self._failed = words
        self._beat += 1
        self._tell()

    def gone(self, who: str) -> str:
        return " ".join(part for part in (who, "This process stops.", self.saved(), FIX) if part)

    def no_answer(self) -> str:
        at = f", at step {self._step}" if self._step is not None else ""
        return self.gone(f"Gone: process 0 at {self._coordinator} (it gives no answer{at}).")

    def _pulse(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self.every):
            self._beat += 1
            self._probe()
            try:
                self._tell()
                found = self._listen(min(time.monotonic() - last, 3 * self.every))
            except Exception:  # any error: if the store stays unreachable, the other thread exits this process in time
                continue
            finally:
                last = time.monotonic()
            self._unanswered = 0.0
            if found is not None and not self._stop.is_set():
                # The store ends with process 0, so process 0 waits until the others have had time to read the verdict.
                self._leave(self.gone(found), 2.5 * self.every if self.member.index == 0 else 0.0)

    def _tell(self) -> None:
        sign = Beat(
            index=self.member.index,
            host=self.member.host,
            beat=self._beat,
            step=self._step,
            host_seconds=_median(self._host_seconds),
            probe_seconds=_median(self._probes) if len(self._probes) == PROBES else None,  # fewer are too noisy
            broken=self.broken,
            failed=self._failed,
        )
        self._store.key_value_set(f"{SIGNS}{sign.index}", json.dumps(dataclasses.asdict(sign)), allow_overwrite=True)

    def _listen(self, awake: float) -> str | None:
        if self.member.index != 0:
            return next((words for _, words in self._store.key_value_dir_get(VERDICT)), None)
        self.ears.hear([Beat(**json.loads(text)) for _, text in self._store.key_value_dir_get(SIGNS)], awake)
        found = self.ears.verdict(self.bounds.lost, 4 * self.every)
        if found is not None:
            self._store.key_value_set(f"{VERDICT}0", found, allow_overwrite=True)
        elif self.on_silence is not None:
            self.on_silence(self.ears.silent(self.late))
        return found

    def _count(self) -> None:
        while not self._stop.wait(self.every):
            self._unanswered += self.every  # not wall time: suspensions of this process must not count
            if self._unanswered > self.bounds.lost and not self._stop.is_set():
                self._leave(self.no_answer(), 0.0)
            if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
                self._leave("`linnet launch` is gone: this process stops.", 0.0)

    def _probe(self) -> None:
        start = time.perf_counter()
        for _ in range(PROBE_TIMES):
            zlib.crc32(PROBE)
        self._probes.append(time.perf_counter() - start)


def _median(values: deque[float]) -> float | None:
    return statistics.median(list(values)) if values else None
