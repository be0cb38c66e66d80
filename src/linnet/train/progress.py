"""Progress display: a bar on a terminal or in a notebook, periodic lines in a log file, nothing when quiet.

Between two refreshes `update` only stores numbers, so a loop can call it at every step.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from linnet.core.formatting import duration
from linnet.train.notebook import NotebookBar, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    Bar = RichProgress | NotebookBar

Item = TypeVar("Item")

BAR_SECONDS = 0.25
LINE_SECONDS = 10.0


class Progress:
    """Progress of a run: `with Progress(1000) as progress: ... progress.update(step, loss=1.2, per_second=5e3)`.

    `start` is the first step of a resumed run; `bits_per_nat` converts the loss to bits per byte (None if not applicable); `unit` is
    the unit of the throughput.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        label: str = "training",
        quiet: bool = False,
        bits_per_nat: float | None = None,
        unit: str = "tok",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.step, self.label = total, start, label
        self._bits_per_nat, self._unit = bits_per_nat, unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._quiet = quiet
        self._every = BAR_SECONDS if shows_bar(self._stream) else LINE_SECONDS
        self._loss: float | None = None
        self._speed: float | None = None
        self._first: tuple[int, float] | None = None
        self._next = math.inf if quiet else clock() + self._every
        self._bar: Bar | None = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and shows_bar(self._stream):
            self._bar = _make_bar(self._stream)
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.step, note="starting")
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._draw(self._clock())
            self._bar.stop()
            self._bar = None
        elif not self._quiet and self._first is not None:
            self._print(self.line())

    def update(self, step: int, loss: float | None = None, per_second: float | None = None) -> None:
        self.step = step
        if loss is not None:
            self._loss = loss
        if per_second is not None:
            self._speed = per_second
        now = self._clock()
        if self._first is None:  # the first step includes compilation, so it is not timed
            self._first = (step, now)
        if now >= self._next:
            self._draw(now)

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            self._print(text)

    def track(self, items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """Iterate over `items` with a second bar below this one (an evaluation inside a run)."""
        if self._bar is None:
            return track(items, label, total, quiet=self._quiet, stream=self._stream, clock=self._clock)
        return _with_task(self._bar, items, label, total, self._clock)

    def seconds_left(self, now: float) -> float | None:
        if self._first is None or self.step <= self._first[0]:
            return None
        return (self.total - self.step) * (now - self._first[1]) / (self.step - self._first[0])

    def line(self) -> str:
        """The current state as one line of plain text."""
        return f"step {self.step:,}/{self.total:,}{self._note(self._clock())}"

    def _note(self, now: float) -> str:
        parts: list[str] = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.3f}")
            if self._bits_per_nat is not None:
                parts.append(f"{self._loss * self._bits_per_nat:.3f} bits/byte")
        if self._speed is not None:
            speed = f"{self._speed:,.0f}" if self._speed < 1e5 else f"{self._speed / 1e3:,.0f}k"
            parts.append(f"{speed} {self._unit}/s")
        left = self.seconds_left(now)
        if left is not None and self.step < self.total:
            parts.append(f"{duration(left)} left")
        return "".join(f"  {part}" for part in parts)

    def _draw(self, now: float) -> None:
        self._next = now + self._every
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.step, note=self._note(now).strip())
            self._bar.refresh()
        elif not self._quiet:
            self._print(self.line())

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except OSError:  # the reader of the stream has gone: continue without output
            self._quiet, self._next = True, math.inf


def track(
    items: Iterable[Item],
    label: str,
    total: int | None = None,
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Iterate over `items` with a progress display: a bar on a terminal, a line every ten seconds elsewhere."""
    out = sys.stderr if stream is None else stream
    if total is None and isinstance(items, Sized):
        total = len(items)
    if quiet:
        yield from items
    elif shows_bar(out):
        with _make_bar(out) as bar:
            yield from _with_task(bar, items, label, total, clock)
    else:
        shown = clock()
        for done, item in enumerate(items):
            if clock() - shown >= LINE_SECONDS:
                shown = clock()
                print(f"{label} {done:,}" + (f"/{total:,}" if total else ""), file=out, flush=True)
            yield item


def _with_task(
    bar: Bar, items: Iterable[Item], label: str, total: int | None, clock: Callable[[], float]
) -> Iterator[Item]:
    if total is None and isinstance(items, Sized):
        total = len(items)
    task: Any = bar.add_task(label, total=total, note="")
    drawn = begun = clock()
    try:
        bar.refresh()
        for done, item in enumerate(items):
            now = clock()
            if now - drawn >= BAR_SECONDS:
                drawn = now
                left = f"{duration((total - done) * (now - begun) / done)} left" if total and done else ""
                bar.update(task, completed=done, note=left)
                bar.refresh()
            yield item
    finally:
        bar.remove_task(task)
        bar.refresh()


def shows_bar(stream: TextIO) -> bool:
    return is_terminal(stream) or (stream is sys.stderr and in_notebook())


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _make_bar(stream: TextIO) -> Bar:
    return _rich_bar(stream) if is_terminal(stream) else NotebookBar()


def _rich_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichBar
    from rich.table import Column

    return RichBar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=stream),
        auto_refresh=False,  # no refresh thread: leave the cores to training
        expand=True,
    )
