"""Metrics of a run: always `metrics.jsonl` (one JSON object per line), optionally TensorBoard and W&B.

`write` returns after the line was written to the file. Each tracker runs on its own thread behind a bounded queue: a slow tracker
drops points, a failing one is switched off, and the run never waits for either.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write

FILE_NAME = "metrics.jsonl"
QUEUE_SIZE = 1000
CLOSE_SECONDS = 5.0
MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}

log = logging.getLogger("linnet")


# The file


class MetricsLog:
    """Appends to `<run>/metrics.jsonl`, and sends every record to the trackers."""

    def __init__(
        self, run: Path, trackers: Sequence[BackgroundTracker] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = run / FILE_NAME
        self._trackers = tuple(trackers)
        self._clock = clock
        self._warned = self._torn = False
        _mend(self.path)
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, step: int, **values: Any) -> dict[str, Any]:
        """Append one line and return its record. A write error such as a full disk is logged once and does not stop the run."""
        record = make_record(kind, step, self._clock(), values)
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            _write_whole(self._fd, b"\n" + line if self._torn else line)
            self._torn = False
        except OSError as error:
            self._torn = True  # part of the line may be written: start the next on a new line
            if not self._warned:
                log.warning("%s cannot be written (%s); the run goes on without it", self.path, error.strerror)
            self._warned = True
        for tracker in self._trackers:
            tracker.send(record)
        return record

    def truncate_after(self, step: int) -> list[dict[str, Any]]:
        """Remove metrics after `step` (a resumed run writes them again), and return the remaining records."""
        figures = ("train", "eval", "test")
        records, n_damaged = _read(self.path)
        if n_damaged:
            log.warning("%s: %d damaged lines are left out", self.path, n_damaged)
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


def _write_whole(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _mend(path: Path) -> None:
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
    whole = [record for record in records if record is not None]
    return whole, len(records) - len(whole)


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    atomic_write(path, text.encode(), sync=True)


# The trackers


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files in `<run>/tensorboard`. A resumed run purges the points after the step it resumes from."""

    def __init__(self, run: Path, resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(logdir=str(run / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run named after the folder. Without an API key it records offline, for `wandb sync`, instead of prompting for one."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "linnet"),
            name=run.name,
            id=_wandb_id(run),
            resume="allow",
            dir=str(run),
            config=config,
            mode=os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline"),
            settings=wandb.Settings(init_timeout=30, console="off", silent=True),
        )
        # A custom step metric: W&B drops points whose built-in step does not increase, as happens after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run: Path) -> str:
    file = run / "wandb-id.txt"
    if not file.exists():
        replace_text(file, secrets.token_hex(8) + "\n")
    return file.read_text().strip()


class BackgroundTracker:
    """Creates and feeds one tracker on a daemon thread. `send` never blocks; a failure is logged once and disables the tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker], size: int = QUEUE_SIZE) -> None:
        self.name = name
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(size)
        self._off = threading.Event()
        self._dropped = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"linnet-{name}", daemon=True)
        self._thread.start()

    def send(self, record: dict[str, Any]) -> None:
        if self._off.is_set() or record["kind"] == "event":
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._dropped:
                log.warning("%s is too slow: some points are left out there (metrics.jsonl has all)", self.name)
            self._dropped = True

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush the queue, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=0 if self._off.is_set() else timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._off.set()
            log.warning("%s did not finish in %g s and is left behind (metrics.jsonl has all)", self.name, timeout)

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (record := self._queue.get()) is not None and not self._off.is_set():
                tracker.log(record["step"], dict(flat_scalars(record)))
            tracker.close()
        # Includes SystemExit: a tracker's library must not end more than its own thread.
        except BaseException as error:
            self._off.set()
            reason = f"{type(error).__name__}: {error}"
            log.warning("%s is switched off, the run goes on (metrics.jsonl has all): %s", self.name, reason)


def flat_scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Flatten a record to tracker names: `train/loss`, `eval/validation/loss`, `train/codebook/entropy/3`.

    Names that contain a slash are used unchanged (the reference prior's names, which existing dashboards expect).
    """
    kind = record["kind"]
    prefix = f"{kind}/{record['split']}" if "split" in record else kind
    hidden = ("kind", "step", "time", "split", "nonfinite")
    whole = {name: value for name, value in record.items() if "/" in name}
    yield from ((name, float(value)) for name, value in whole.items() if isinstance(value, int | float))
    rest = ((name, value) for name, value in record.items() if name not in hidden and name not in whole)
    yield from _flatten(prefix, rest)


def _flatten(prefix: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, float]]:
    for name, value in items:
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}/{name}", value.items())
        elif isinstance(value, list):
            yield from _flatten(f"{prefix}/{name}", enumerate(value))
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", float(value)


def require_trackers(names: Sequence[str]) -> None:
    """Raise, before a run starts, if a tracker is unknown or not installed."""
    for name in names:
        if name not in MODULES:
            raise invalid("train.trackers", name, f"one of {', '.join(MODULES)}", "choose one of them")
        if importlib.util.find_spec(MODULES[name]) is None:
            raise UserError(
                f"train.trackers asks for {name!r}, but {MODULES[name]} is not installed. "
                f"Fix: pip install 'linnet-lm[{name}]', or leave it out."
            )


def open_trackers(
    names: Sequence[str], run: Path, config: dict[str, Any], resume_step: int | None = None
) -> tuple[BackgroundTracker, ...]:
    """Start the trackers of a run. Does not wait for the network."""
    require_trackers(names)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run, resume_step),
        "wandb": lambda: WandB(run, config),
    }
    return tuple(BackgroundTracker(name, makers[name]) for name in dict.fromkeys(names))
