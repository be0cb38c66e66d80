"""The metrics file survives kills, resumes and odd numbers; a tracker never stops or slows a run."""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE

from linnet.core.errors import UserError
from linnet.runs import metrics, trackers
from linnet.runs.metrics import MetricsLog, make_record, read_metrics
from linnet.runs.trackers import BackgroundTracker, open_trackers, require_trackers


def lines_of(run: Path) -> list[dict[str, Any]]:
    def refuse_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def test_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, clock=lambda: 12.34567)
    log.write("train", 3, loss=1.5, codebook={"entropy": [1.0, 2.0]})
    assert lines_of(tmp_path) == [
        {"kind": "train", "step": 3, "time": 12.346, "loss": 1.5, "codebook": {"entropy": [1.0, 2.0]}}
    ]
    log.close()


def test_numbers_of_any_library_become_plain(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(
            "train",
            np.int64(7),  # pyright: ignore[reportArgumentType]
            a=np.float32(0.5),
            b=jnp.float32(0.25),
            c=jnp.array([1.0, 2.0], jnp.bfloat16),
            d=np.bool_(True),
            e=jnp.int32(3),
            f=[np.float64(1.0), (jnp.float32(2.0),)],
            g=None,
            h="words",
        )
    line = lines_of(tmp_path)[0]
    assert {k: line[k] for k in "abcdefgh"} == {
        "a": 0.5, "b": 0.25, "c": [1.0, 2.0], "d": True, "e": 3, "f": [1.0, [2.0]], "g": None, "h": "words",
    }  # fmt: skip
    assert line["step"] == 7


def test_nonfinite_values_are_null_and_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("train", 1, loss=jnp.float32(jnp.nan), lr=1.0, codebook={"entropy": np.array([1.0, np.inf])})
    line = lines_of(tmp_path)[0]
    assert line["loss"] is None
    assert line["codebook"] == {"entropy": [1.0, None]}
    assert line["nonfinite"] == ["loss", "codebook.entropy[1]"]


LEAVES = st.floats() | st.integers() | st.none()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=5))
def test_every_record_is_strict_json(values: dict[str, Any]) -> None:
    json.dumps(make_record("train", 0, 0.0, values), allow_nan=False)


def write_run(log: MetricsLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.write("train", step, loss=1.0 / step)
        if step % 2 == 0:
            log.write("eval", step, loss=2.0 / step, split="validation")


def without_times(run: Path) -> list[dict[str, Any]]:
    kept = [r for r in read_metrics(run) if r["kind"] != "event"]
    return [{k: v for k, v in r.items() if k != "time"} for r in kept]


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    with MetricsLog(whole) as log:
        write_run(log, 1, 9)
    with MetricsLog(broken) as log:
        write_run(log, 1, 6)
        log.write("event", 6, event="interrupted")
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 7, "lo')  # killed in mid-line
    with MetricsLog(broken) as log:
        kept = log.truncate_after(4)
        assert max(r["step"] for r in kept if r["kind"] != "event") == 4
        assert [r["event"] for r in kept if r["kind"] == "event"] == ["interrupted"]
        log.write("event", 4, event="resume")
        write_run(log, 5, 9)
    assert without_times(broken) == without_times(whole)
    assert [r["event"] for r in read_metrics(broken) if r["kind"] == "event"] == ["interrupted", "resume"]
    assert [p.name for p in broken.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 2, 3, 9, 20, 40, 44])
def test_file_cut_anywhere_is_read_and_appended_to(tmp_path: Path, cut: int) -> None:
    with MetricsLog(tmp_path, clock=lambda: 5.0) as log:
        log.write("train", 1, loss=1.0)
        log.write("train", 2, loss=2.0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    before = read_metrics(path)
    assert [r["step"] for r in before] == ([1, 2] if cut == 1 else [1])
    with MetricsLog(tmp_path) as log:
        log.write("train", 3, loss=3.0)
    assert read_metrics(tmp_path) == [*before, lines_of(tmp_path)[-1]]
    assert lines_of(tmp_path)[-1]["step"] == 3


def test_reader_skips_corrupt_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'\n{"kind": "train", "step": 1}\nrubbish\n[1]\n{"kind": "train"}\n{"step": 2, "kind": 3}\n\xff\xfe\n'
    )
    assert read_metrics(path) == [{"kind": "train", "step": 1}]


def test_full_disk_is_reported_once_and_leaves_complete_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path)
    real = metrics.os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) - 9])

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "write", full)
        log.write("train", 1, loss=1.0)
        log.write("train", 2, loss=1.0)
    log.write("train", 3, loss=1.0)
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [3]
    assert [r.message for r in caplog.records if "No space left" in r.message] == [caplog.records[0].message]


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        self.seen.append((step, values))

    def close(self) -> None:
        self.closed = True


def test_trackers_get_flat_scalars_and_no_events(tmp_path: Path) -> None:
    tracker = Recorder()
    with MetricsLog(tmp_path, [BackgroundTracker("recorder", lambda: tracker)]) as log:
        log.write("event", 0, event="start")
        log.write("train", 1, loss=1.0, lr=float("nan"), codebook={"entropy": [3.0, 4.0]})
        log.write("eval", 1, split="validation", loss=2.0)
    assert tracker.seen == [
        (1, {"train/loss": 1.0, "train/codebook/entropy/0": 3.0, "train/codebook/entropy/1": 4.0}),
        (1, {"eval/validation/loss": 2.0}),
    ]
    assert tracker.closed


@pytest.mark.parametrize("where", ["make", "log", "close"])
@pytest.mark.parametrize("error", [OSError("no network"), SystemExit(1)])
def test_failing_tracker_is_reported_once_and_disabled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    def make() -> Recorder:
        tracker = Recorder()
        if where == "make":
            fail()
        else:
            setattr(tracker, where, fail)
        return tracker

    other = Recorder()
    with caplog.at_level(logging.WARNING, logger="linnet"):
        trackers = [BackgroundTracker("broken", make), BackgroundTracker("other", lambda: other)]
        with MetricsLog(tmp_path, trackers) as log:
            for step in range(20):
                log.write("train", step, loss=1.0)
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "broken is disabled, and the run continues (metrics.jsonl has all)"
    ]
    assert len(other.seen) == len(read_metrics(tmp_path)) == 20


def test_hanging_tracker_never_blocks_the_run(caplog: pytest.LogCaptureFixture) -> None:
    free, returned = threading.Event(), threading.Event()

    def hang() -> Recorder:
        free.wait(PATIENCE)
        returned.set()
        return Recorder()

    tracker = BackgroundTracker("stuck", hang, size=5)
    for step in range(100):
        tracker.send({"kind": "train", "step": step, "loss": 1.0})
    tracker.close(timeout=0.1)
    assert not returned.is_set(), "neither sending nor closing waited for the tracker"
    free.set()
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "stuck is too slow",
        "stuck did not finish within 0.1 s and is abandoned (metrics.jsonl has all)",
    ]


def test_tracker_not_installed_is_rejected_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'linnet-lm\[wandb\]'"):
        open_trackers(("wandb",), tmp_path, {})
    with pytest.raises(UserError, match=r"pip install 'linnet-lm\[tensorboard\]'"):
        require_trackers(("tensorboard",))
    with pytest.raises(UserError, match="tensorboard, wandb"):
        require_trackers(("mlflow",))


def test_tensorboard_writes_event_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboardX")
    with MetricsLog(tmp_path, open_trackers(("tensorboard",), tmp_path, {}, resume_step=3)) as log:
        log.write("train", 4, loss=1.25)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()
    assert caplog.records == []


def test_wandb_keeps_its_run_across_resumes_and_never_asks_for_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run = types.SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: None)

    def init(**settings: Any) -> Any:
        started.append(settings)
        return run

    fake = types.SimpleNamespace(init=init, api=types.SimpleNamespace(api_key=None), Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for step in (1, 2):
        with MetricsLog(tmp_path, open_trackers(("wandb",), tmp_path, {"seed": 1})) as log:
            log.write("train", step, loss=1.0)
    assert started[0]["mode"] == "offline"
    assert started[0]["settings"]["init_timeout"] <= 60
    assert started[0]["id"] == started[1]["id"]
    assert started[0]["config"] == {"seed": 1}
    assert logged == [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 1.0}]
    assert caplog.records == []


KINDS = ("train", "eval", "event")
DAMAGED = {
    "infinite": b'{"kind": "eval", "step": 4, "time": 1.0, "loss": 1e999}',
    "nan": b'{"kind": "train", "step": 4, "time": 1.0, "loss": NaN}',
    "infinity": b'{"kind": "train", "step": 4, "time": 1.0, "loss": -Infinity}',
    "infinite within": b'{"kind": "train", "step": 4, "time": 1.0, "codebook": {"entropy": [1.0, 1e999]}}',
    "torn": b'{"kind": "eval", "step": 4, "ti',
    "binary": bytes(range(128, 256)) + b"\0\xff",
    "nested": b'{"kind": "train", "step": 4, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no object": b'[{"kind": "train", "step": 4}]',
    "a number": b"4",
    "no step": b'{"kind": "train", "step": "4"}',
    "true for a step": b'{"kind": "train", "step": true}',
    "a huge integer": b'{"kind": "train", "step": 4, "loss": 1' + b"0" * 400 + b"}",
    "more digits than Python reads": b'{"kind": "train", "step": 1' + b"0" * 5000 + b"}",
    "a huge step": b'{"kind": "train", "step": 1' + b"0" * 30 + b"}",
    "zeros": b"\0" * 4096,
}
ODD_VALUES = {
    "text for a loss": b'{"kind": "eval", "step": 4, "time": 1.0, "loss": "low"}',
    "a list for a loss": b'{"kind": "train", "step": 4, "time": [], "loss": [1, {}], "codebook": 3, "rss_bytes": {}}',
    "no time": b'{"kind": "event", "step": -4, "event": null, "message": {}}',
    "odd events": b'{"kind": "event", "step": 4, "time": 1e300, "event": ["x"], "message": "\\ud800"}',
}


@pytest.mark.parametrize("line", [*DAMAGED.values(), *ODD_VALUES.values()], ids=[*DAMAGED, *ODD_VALUES])
@pytest.mark.parametrize("end", [b"\n", b""], ids=["ended", "last"])
def test_corrupt_line_never_blocks_a_resume_or_a_report(tmp_path: Path, line: bytes, end: bytes) -> None:
    good = [{"kind": kind, "step": i, "time": float(i), "loss": 1.0 / (i + 1)} for i in range(4) for kind in KINDS]
    text = "".join(json.dumps(record) + "\n" for record in good).encode()
    (tmp_path / "metrics.jsonl").write_bytes(text[: len(text) // 2].rpartition(b"\n")[0] + b"\n" + line + b"\n")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(text[len(text) // 2 :].partition(b"\n")[2] + line + end)
    from linnet.report.build import render

    assert "<html" in render(tmp_path)
    with MetricsLog(tmp_path) as log:
        kept = log.truncate_after(5)
        log.write("train", 6, loss=0.5)
    odd = [record for record in kept if record not in good]
    assert len(odd) == (2 if line in ODD_VALUES.values() else 0)
    assert len(kept) - len(odd) == len(good) - 1  # the one that was cut in two above
    assert lines_of(tmp_path)[-1]["step"] == 6
    assert "<html" in render(tmp_path)


def test_corrupt_lines_are_reported_when_they_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(DAMAGED["nan"] + b"\n" + DAMAGED["binary"] + b"\n")
    with MetricsLog(tmp_path) as log, caplog.at_level(logging.WARNING):
        assert log.truncate_after(5) == []
    assert "2 damaged lines are skipped" in caplog.text
