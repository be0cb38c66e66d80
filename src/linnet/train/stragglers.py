"""A run's eye on its processes: who is slow is named in the log, and an error that is only a lost process's echo is told as that.

All processes wait for each other in every update, so a slow one slows them all and their step times do not tell which it was. What
tells is what each does alone: its host's work between updates, and how long a fixed piece of work takes it.
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
"""So much slower than the median is slow."""
MIN_SECONDS = 0.01
"""An update's host work below this is noise."""


class Watch(Protocol):
    def stepped(self, step: int, host_seconds: float) -> None:
        """After every update. `host_seconds`: what this process's host did for it by itself, mostly making the batch."""
        ...


class NullMonitor:
    def stepped(self, step: int, host_seconds: float) -> None:
        pass


class StragglerMonitor:
    def __init__(self, pulse: Heartbeat, say: Callable[[int, str], None], tell: Callable[[str], None]) -> None:
        self._pulse, self._say, self._tell = pulse, say, tell
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
            self._say(step, self._unwritten.pop(0))
        if time.monotonic() - self._asked_at < self._pulse.late:
            return
        self._asked_at = time.monotonic()
        slow = stragglers(dict(self._pulse.ears.signs))
        for index, words in slow.items():
            if index in self._suspects and index not in self._named:  # seen twice: once may be chance
                self._say(step, words)
                self._named.add(index)
        self._named &= set(slow)
        self._suspects = set(slow)

    def _hear_silence(self, silent: list[MissedBeats]) -> None:
        """On the pulse's thread, while the run waits: shown at once, and among the run's events with the next update."""
        for one in silent:
            if one.index not in self._silent:
                at = f", last seen at step {one.sign.step}" if one.sign and one.sign.step is not None else ""
                host = f" on {one.sign.host}" if one.sign else ""
                self._tell(f"Waiting for process {one.index}{host} since {one.seconds:.0f} s{at}.")
            self._silent[one.index] = one.seconds
        for index in set(self._silent) - {one.index for one in silent}:
            sign = self._pulse.ears.signs.get(index)
            host = f" on {sign.host}" if sign else ""
            self._unwritten.append(
                f"Process {index}{host} was silent for {self._silent.pop(index):.0f} s, and goes on."
            )


def stragglers(signs: Mapping[int, Beat]) -> dict[int, str]:
    """Who is much slower than the median, and by what it shows."""
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
    *, say: Callable[[int, str], None], tell: Callable[[str], None], saved: Callable[[], int | None]
) -> Iterator[Watch]:
    """While the run lasts. `say(step, words)` writes an event of the run and shows it; `tell` only shows, from any thread; `saved` is
    the last committed step."""
    pulse = cluster.current_heartbeat()
    if pulse is None:
        yield NullMonitor()
        return
    pulse.saved = lambda: _kept(saved)
    try:
        yield StragglerMonitor(pulse, say, tell)
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
