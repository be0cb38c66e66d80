"""Metrics of a run: `metrics.jsonl`, one JSON object per line, from which every record also goes to the trackers."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from linnet.core.files import atomic_write
from linnet.runs.trackers import BackgroundTracker

FILE_NAME = "metrics.jsonl"

log = logging.getLogger("linnet")


class MetricsLog:
    """Appends to `<run>/metrics.jsonl`, and sends every record to the trackers."""

    def __init__(
        self, run: Path, trackers: Sequence[BackgroundTracker] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = run / FILE_NAME
        self._trackers = tuple(trackers)
        self._clock = clock
        self._has_warned = self._is_torn = False
        _repair_end(self.path)
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append one line, which is in the file when this returns, and return its record.

        A write error, such as a full disk, is logged once and does not stop the run.
        """
        record = make_record(kind, step, self._clock(), values)
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            _write_all(self._fd, b"\n" + line if self._is_torn else line)
            self._is_torn = False
        except OSError as error:
            self._is_torn = True  # part of the line may be written: start the next on a new line
            if not self._has_warned:
                log.warning("%s cannot be written (%s); the run continues without it", self.path, error.strerror)
            self._has_warned = True
        for tracker in self._trackers:
            tracker.send(record)
        return record

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove metrics after `step` (a resumed run writes them again), and return the remaining records."""
        figures = ("train", "eval", "test")
        records, n_damaged = _read(self.path)
        if n_damaged:
            log.warning("%s: %d damaged lines are skipped", self.path, n_damaged)
        kept = [r for r in records if r["kind"] not in figures or r["step"] <= step]
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
        os.close(self._fd)
        try:
            replace_text(self.path, text)
        finally:
            self._fd = self._open()
        return kept

    def close(self) -> None:
        os.close(self._fd)
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class NoMetrics:
    """Discards metrics, for processes other than process 0."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        pass

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        return []

    def __enter__(self) -> NoMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def make_record(kind: str, step: int, now: float, values: dict[str, Any]) -> dict[str, Any]:
    """Return one record as strict JSON. Nonfinite values become null and are listed in `nonfinite`."""
    nonfinite: list[str] = []
    record = {"kind": kind, "step": int(step), "time": round(now, 3)}
    record |= {name: _plain(value, name, nonfinite) for name, value in values.items()}
    return {**record, "nonfinite": nonfinite} if nonfinite else record


def _plain(value: Any, where: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(where)
        return None
    if isinstance(value, dict):
        return {str(name): _plain(item, f"{where}.{name}", nonfinite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", nonfinite) for i, item in enumerate(value)]
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":  # bfloat16 and other ml_dtypes have kind V; float32 represents them all
        array = array.astype(np.float32)
    return _plain(array.tolist(), where, nonfinite)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _repair_end(path: Path) -> None:
    """Remove or terminate a partial last line, left by a kill or a full disk, so that the next line starts cleanly."""
    if not path.exists():
        return
    data = path.read_bytes()
    head, newline, tail = data.rpartition(b"\n")
    if not tail:
        return
    with path.open("r+b") as file:
        if _parse(tail) is None:
            file.truncate(len(head) + len(newline))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None if `write` cannot have written it."""
    try:
        record = json.loads(line, parse_float=_finite, parse_int=_bounded, parse_constant=_finite)
    except (ValueError, RecursionError):  # deep nesting raises RecursionError
        return None
    known = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return record if known and type(record.get("step")) is int else None


def _finite(digits: str) -> float:
    """Parse a float; reject NaN and Infinity, which are not JSON, and literals such as 1e999 that overflow."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not finite")
    return value


def _bounded(digits: str) -> int:
    """Parse an int; reject values beyond 64 bits, which cannot be a step, a count or a date."""
    value = int(digits)
    if abs(value) >= 2**63:
        raise ValueError("not a count")
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics file, given its path or its run folder. Damaged lines are skipped."""
    return _read(path / FILE_NAME if path.is_dir() else path)[0]


def _read(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records, and the number of lines that cannot be read."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    records = [_parse(line) for line in data.split(b"\n") if line]
    valid = [record for record in records if record is not None]
    return valid, len(records) - len(valid)


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    atomic_write(path, text.encode(), sync=True)
