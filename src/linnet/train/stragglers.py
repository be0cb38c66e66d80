"""Straggler detection, and attribution of errors that were caused by a lost peer.

All processes wait for each other in every update, so a slow one slows them all and step times do not identify it. Two measurements
that do not depend on the other processes do: the host time between updates, and the time of a fixed probe computation.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from linnet.parallel import cluster
from linnet.parallel.cluster.heartbeat import Beat, Heartbeat, MissedBeats

TIMES_MEDIAN = 3.0
"""A process is slow if it takes more than this many times the median of the others."""
MIN_SECONDS = 0.01
"""Minimum excess of host time per update; smaller differences are noise."""


class PeerMonitor(Protocol):
    def stepped(self, step: int, host_seconds: float) -> None:
        """Record an update. `host_seconds`: host time this process spent on it, mostly preparing the batch."""
        ...


class NullMonitor:
    def stepped(self, step: int, host_seconds: float) -> None:
        pass


class StragglerMonitor:
    def __init__(self, pulse: Heartbeat, log: Callable[[int, str], None], notify: Callable[[str], None]) -> None:
        self._pulse, self._log, self._notify = pulse, log, notify
        self._named: set[int] = set()
        self._silent: dict[int, float] = {}
        self._unwritten: list[str] = []
        self._asked_at = time.monotonic()
        self._suspects: set[int] = set()
        if pulse.member.index == 0:
            pulse.on_silence = self._hear_silence

    def stepped(self, step: int, host_seconds: float) -> None:
        self._pulse.stepped(step, host_seconds)
        if self._pulse.member.index != 0:
            return
        while self._unwritten:
            self._log(step, self._unwritten.pop(0))
        if time.monotonic() - self._asked_at < self._pulse.late:
            return
        self._asked_at = time.monotonic()
        slow = stragglers(dict(self._pulse.ears.signs))
        for index, message in slow.items():
            if index in self._suspects and index not in self._named:  # report only after two checks in a row
                self._log(step, message)
                self._named.add(index)
        self._named &= set(slow)
        self._suspects = set(slow)

    def _hear_silence(self, silent: list[MissedBeats]) -> None:
        """Display missed beats at once (on the heartbeat's thread), and log the recovery as an event at the next update."""
        for one in silent:
            if one.index not in self._silent:
                at = f", last seen at step {one.sign.step}" if one.sign and one.sign.step is not None else ""
                host = f" on {one.sign.host}" if one.sign else ""
                self._notify(f"Waiting for process {one.index}{host} since {one.seconds:.0f} s{at}.")
            self._silent[one.index] = one.seconds
        for index in set(self._silent) - {one.index for one in silent}:
            sign = self._pulse.ears.signs.get(index)
            host = f" on {sign.host}" if sign else ""
            self._unwritten.append(
                f"Process {index}{host} was silent for {self._silent.pop(index):.0f} s, and goes on."
            )


def stragglers(signs: Mapping[int, Beat]) -> dict[int, str]:
    """Return a message for each process that is much slower than the median of the others."""
    found: dict[int, str] = {}
    for least, name, of in (
        (MIN_SECONDS, "its host's work for an update takes", lambda sign: sign.host_seconds),
        (0.0, "a fixed piece of work takes it", lambda sign: sign.probe_seconds),
    ):
        figures = {index: of(sign) for index, sign in signs.items() if of(sign) is not None}
        if len(figures) < 2:
            continue
        for index, seconds in figures.items():
            usual = statistics.median(other for i, other in figures.items() if i != index)
            if seconds > TIMES_MEDIAN * usual and seconds - usual > least:
                times = f"{seconds / usual:.1f} times" if usual > 0 else "more than"
                found[index] = (
                    f"Process {index} on {signs[index].host} is slow: {name} {1e3 * seconds:.1f} ms, {times} the median of the "
                    f"others ({1e3 * usual:.1f} ms)."
                )
    return found


@contextlib.contextmanager
def monitor(
    *, log: Callable[[int, str], None], notify: Callable[[str], None], saved: Callable[[], int | None]
) -> Iterator[PeerMonitor]:
    """Monitor the peers while the context is open.

    `log(step, message)` logs an event of the run and displays it; `notify` only displays, from any thread; `saved` returns the last
    committed step.
    """
    pulse = cluster.current_heartbeat()
    if pulse is None:
        yield NullMonitor()
        return
    pulse.saved = lambda: _kept(saved)
    try:
        yield StragglerMonitor(pulse, log, notify)
    except Exception as error:
        cluster.attribute_failure(error)
        raise
    finally:
        pulse.on_silence = None


def _kept(saved: Callable[[], int | None]) -> str:
    try:
        step = saved()
    except OSError:
        return ""
    return "Nothing was saved yet." if step is None else f"Nothing after the last checkpoint, step {step}, is kept."
