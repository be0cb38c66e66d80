"""Progress: a bar on a terminal, a line now and then elsewhere, nothing when quiet, and next to no cost."""

from __future__ import annotations

import io
import math
import re
import time

import pytest

from linnet.core.formatting import duration
from linnet.train.progress import Progress, track

BITS = 1 / math.log(2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_terminal_shows_a_complete_progress_bar(terminal: Terminal) -> None:
    clock = Clock()
    with Progress(100, stream=terminal, clock=clock, bits_per_nat=BITS) as progress:
        for step in range(1, 51):
            clock.now += 1.0
            progress.update(step, loss=0.6931472, per_second=5210.0)
        progress.log("a [word] above")
        last = plain(terminal.getvalue()).split("\r")[-1]
    for words in ("training", "50/100", "loss 0.693", "1.000 bits/byte", "5,210 tok/s", "0:50 left"):
        assert words in last, words
    assert "a [word] above\n" in plain(terminal.getvalue())
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is given back


def test_narrow_terminal_loses_the_bar_before_the_figures(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    clock = Clock()
    with Progress(1500, stream=terminal, clock=clock) as progress:
        for step in range(1, 700):
            clock.now += 1.0
            progress.update(step, loss=1.25, per_second=15210.0)
        last = plain(terminal.getvalue()).split("\r")[-1]
    assert "699/1500" in last
    assert "left" in last


def test_bar_is_drawn_four_times_a_second_at_most(terminal: Terminal) -> None:
    clock = Clock()
    with Progress(1000, stream=terminal, clock=clock) as progress:
        for step in range(1, 1001):
            clock.now += 0.01
            progress.update(step, loss=1.0)
        assert terminal.getvalue().count("\r") <= 45


def test_log_file_gets_a_line_every_ten_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(100, stream=out, clock=clock, bits_per_nat=BITS) as progress:
        for step in range(1, 36):
            clock.now += 1.0
            progress.update(step, loss=0.6931472 if step % 5 == 0 else None, per_second=100.0)
        progress.log("validation 1.9 bits per byte")
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 10/100  loss 0.693  1.000 bits/byte  100 tok/s  1:30 left"
    assert [line.split("  ")[0] for line in lines] == [
        "step 10/100", "step 20/100", "step 30/100", "validation 1.9 bits per byte", "step 35/100",
    ]  # fmt: skip
    assert "\x1b" not in out.getvalue()


def test_tokens_longer_than_a_byte() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(2, stream=out, clock=clock, bits_per_nat=BITS / 2) as progress:
        progress.update(1, loss=0.6931472)
    assert "0.500 bits/byte" in out.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_is_silent(stream: type[io.StringIO]) -> None:
    out, clock = stream(), Clock()
    with Progress(10, quiet=True, stream=out, clock=clock) as progress:
        for step in range(1, 11):
            clock.now += 60.0
            progress.update(step, loss=1.0)
        progress.log("nothing")
        assert list(progress.track(range(3), "evaluating")) == [0, 1, 2]
    assert list(track(range(3), "evaluating", quiet=True, stream=out, clock=clock)) == [0, 1, 2]
    assert out.getvalue() == ""


def test_reader_that_left_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = Clock()
    with Progress(10, stream=Gone(), clock=clock) as progress:
        for step in range(1, 11):
            clock.now += 60.0
            progress.update(step, loss=1.0)
        progress.log("still here")


def test_update_costs_microseconds() -> None:
    progress = Progress(10**9, stream=io.StringIO())
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()  # CPU time of this thread: what else runs on the machine does not count
        for step in range(2000):
            progress.update(step, loss=1.0, per_second=1.0)
        best = min(best, (time.thread_time() - started) / 2000)
    assert best < 20e-6


def test_track_in_a_log_file_writes_every_ten_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    for _ in track(range(30), "evaluating", stream=out, clock=clock):
        clock.now += 1.0
    assert out.getvalue().splitlines() == ["evaluating 10/30", "evaluating 20/30"]


def test_track_on_a_terminal_alone_and_inside_a_run(terminal: Terminal) -> None:
    clock = Clock()
    for i, _ in enumerate(track(range(4), "evaluating", stream=terminal, clock=clock)):
        clock.now += 1.0
        if i == 2:
            break  # leaving early gives the terminal back too
    with Progress(10, stream=terminal, clock=clock) as progress:
        for _ in progress.track(iter(range(4)), "evaluating", total=4):
            clock.now += 1.0
        shown = plain(terminal.getvalue())
        progress.update(1, loss=1.0)
    assert "2/4" in shown
    assert "training" in shown


def test_durations() -> None:
    assert [duration(s) for s in (0, 7.4, 65, 3725, 90061)] == ["0:00", "0:07", "1:05", "1:02:05", "1 d 1:01"]
