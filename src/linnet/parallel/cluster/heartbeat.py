"""Signs of life: every process tells the others where it is, and process 0 says who is gone.

The signs lie in the key-value store of JAX's coordination service, which lives in process 0. Each process writes its own and
reads one verdict; only process 0 reads all, so that a thousand processes cost it a thousand short messages a beat and no more.
Process 0 is missed by its store giving no answer. Time in which this process itself stood still counts for nobody's silence.
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
"""How long a process that failed by itself is given company: the others may be about to fail of the same, and to say it better."""
PROBE, PROBE_TIMES, PROBES = bytes(1 << 20), 16, 15
"""Some milliseconds of one core: more than a scheduler gives at once, so that a crowded core shows as well as a slow one."""
FIX = "Fix: start the same command again in all processes (`linnet launch --restarts N` does it by itself)."


class Store(Protocol):
    """What is used of JAX's client."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """What a process says of itself with every beat."""

    index: int
    host: str
    beat: int
    step: int | None = None
    host_seconds: float | None = None
    """A usual update's work of the host: mostly making the batch."""
    probe_seconds: float | None = None
    """A fixed piece of work for one core."""
    broken: bool = False
    """It has lost a connection to another: this run cannot go on."""
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
    """What process 0 hears: when each process last gave a new sign, on a clock that stands still with this process."""

    def __init__(self, count: int) -> None:
        self.signs: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(count), 0.0)
        self._failed: dict[int, float] = {}
        self._now = 0.0

    def hear(self, signs: list[Beat], awake: float) -> None:
        """`awake`: seconds since the last time that this process was not stopped."""
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
        """Who is gone, in words, if anybody is. Where a connection broke, less silence is enough."""
        for index, at in self._failed.items():
            if self._now - at >= min(FAILED_SECONDS, lost):
                return f"Process {index} on {self.signs[index].host} failed: {self.signs[index].failed}"
        broken = any(sign.broken for sign in self.signs.values())
        silent = self.silent(min(lost, lost_if_broken) if broken else lost)
        gone = [one for one in silent if one.index not in self._failed]  # those have said why, and are named by that
        if not gone:
            return None
        return f"Gone: {'; '.join(map(str, gone[:3]))}{'; and more' if len(gone) > 3 else ''}."


class Heartbeat:
    """The two threads of a process: one beats and listens, one counts how long the store gives no answer."""

    def __init__(
        self, store: Store, member: Member, bounds: Timeouts, coordinator: str, leave: Callable[[str, float], Any]
    ) -> None:
        """`leave(words, after)` ends the process so many seconds after it said them."""
        self._coordinator = coordinator
        self.member, self.bounds = member, bounds
        self.ears = FailureDetector(member.count)
        self.on_silence: Callable[[list[MissedBeats]], None] | None = None
        """Called by process 0 with every beat: who has been silent for a while, though not yet for so long as to be gone."""
        self.saved: Callable[[], str] = lambda: ""
        """What is kept of the run, in a sentence."""
        self.every = min(1.0, bounds.lost / 6)
        self.late = max(2 * self.every, bounds.lost / 6)
        self._store, self._leave = store, leave
        self._beat, self._unanswered = 0, 0.0
        self._step: int | None = None
        self._failed: str | None = None
        self.broken = False
        """Told to the others: a connection broke here, so that this run cannot go on."""
        self._host_seconds: deque[float] = deque(maxlen=PROBES)
        self._probes: deque[float] = deque(maxlen=PROBES)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("pulse", self._pulse), ("answers", self._count))
        ]

    def start(self) -> Heartbeat:
        self._tell()  # before anything else, so that silence has a host's name
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
        """Tells the others that this process ends, and why."""
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
            except Exception:  # of whatever kind: without an answer the other thread ends this process in time
                continue
            finally:
                last = time.monotonic()
            self._unanswered = 0.0
            if found is not None and not self._stop.is_set():
                # The store goes with process 0: it stays until the others have had time to read the verdict.
                self._leave(self.gone(found), 2.5 * self.every if self.member.index == 0 else 0.0)

    def _tell(self) -> None:
        sign = Beat(
            index=self.member.index,
            host=self.member.host,
            beat=self._beat,
            step=self._step,
            host_seconds=_median(self._host_seconds),
            probe_seconds=_median(self._probes) if len(self._probes) == PROBES else None,  # few of them are noise
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
            self._unanswered += self.every  # a clock that stands still with this process
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
