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
    """Logs stragglers and late processes on process 0. `log` records an event of the run and prints it; `notify` only prints."""

    def __init__(self, heartbeat: Heartbeat, log: Callable[[int, str], None], notify: Callable[[str], None]) -> None:
        self._heartbeat, self._log, self._notify = heartbeat, log, notify
        self._late: dict[int, MissedBeats] = {}
        self._recovered: list[str] = []
        self._checked_at = time.monotonic()
        self._suspects: set[int] = set()
        self._reported: set[int] = set()
        if heartbeat.member.index == 0:
            heartbeat.on_late = self._report_late

    def stepped(self, step: int, host_seconds: float) -> None:
        self._heartbeat.stepped(step, host_seconds)
        if self._heartbeat.member.index != 0:
            return
        while self._recovered:
            self._log(step, self._recovered.pop(0))
        if time.monotonic() - self._checked_at < self._heartbeat.late_seconds:
            return
        self._checked_at = time.monotonic()
        slow = stragglers(dict(self._heartbeat.detector.beats))
        for index, message in slow.items():
            if index in self._suspects and index not in self._reported:  # report only after two checks in a row
                self._log(step, message)
                self._reported.add(index)
        self._reported &= set(slow)
        self._suspects = set(slow)

    def _report_late(self, missed: list[MissedBeats]) -> None:
        """Display late processes at once (on the heartbeat's thread), and log their recovery as an event at the next update."""
        late = {each.index: each for each in missed}
        for index, each in late.items():
            if index not in self._late:
                self._notify(f"Waiting for process {index}{each.host} for {each.seconds:.0f} s{each.step}.")
        for index, each in self._late.items():
            if index not in late:
                self._recovered.append(
                    f"Process {index}{each.host} sent no heartbeat for {each.seconds:.0f} s, and has recovered."
                )
        self._late = late


def stragglers(beats: Mapping[int, Beat]) -> dict[int, str]:
    """Return a message for each process that is much slower than the median of the others."""
    messages: dict[int, str] = {}
    for min_excess, work, seconds_of in (
        (MIN_SECONDS, "its host work per update takes", lambda beat: beat.host_seconds),
        (0.0, "a fixed computation takes", lambda beat: beat.probe_seconds),
    ):
        measured = {index: seconds_of(beat) for index, beat in beats.items() if seconds_of(beat) is not None}
        if len(measured) < 2:
            continue
        for index, seconds in measured.items():
            median = statistics.median(other for i, other in measured.items() if i != index)
            if seconds > TIMES_MEDIAN * median and seconds - median > min_excess:
                times = f"{seconds / median:.1f} times" if median > 0 else "more than"
                messages[index] = (
                    f"Process {index} on {beats[index].host} is slow: {work} {1e3 * seconds:.1f} ms, {times} the median of the "
                    f"others ({1e3 * median:.1f} ms)."
                )
    return messages


@contextlib.contextmanager
def monitor(
    *, log: Callable[[int, str], None], notify: Callable[[str], None], saved: Callable[[], int | None]
) -> Iterator[PeerMonitor]:
    """Monitor the peers while the context is open.

    `log(step, message)` logs an event of the run and displays it; `notify` only displays, from any thread; `saved` returns the last
    committed step.
    """
    heartbeat = cluster.current_heartbeat()
    if heartbeat is None:
        yield NullMonitor()
        return
    heartbeat.describe_saved = lambda: _describe_saved(saved)
    try:
        yield StragglerMonitor(heartbeat, log, notify)
    except Exception as error:
        cluster.attribute_failure(error)
        raise
    finally:
        heartbeat.on_late = None


def _describe_saved(saved: Callable[[], int | None]) -> str:
    try:
        step = saved()
    except OSError:
        return ""
    return (
        "No checkpoint was saved yet." if step is None else f"Updates after the last checkpoint, step {step}, are lost."
    )
