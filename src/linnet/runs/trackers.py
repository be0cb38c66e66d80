"""Trackers of a run: TensorBoard and W&B, besides `metrics.jsonl`.

Each tracker runs on its own thread behind a bounded queue: a slow tracker drops points, a failing one is disabled, and the run never
waits for either.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write

QUEUE_SIZE = 1000
CLOSE_SECONDS = 5.0
MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}

log = logging.getLogger("linnet")


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
        atomic_write(file, (secrets.token_hex(8) + "\n").encode(), sync=True)
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
                log.warning("%s is too slow: some points are dropped there (metrics.jsonl has all)", self.name)
            self._dropped = True

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Flush the queue, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=0 if self._off.is_set() else timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._off.set()
            log.warning("%s did not finish within %g s and is abandoned (metrics.jsonl has all)", self.name, timeout)

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
            log.warning("%s is disabled, and the run continues (metrics.jsonl has all): %s", self.name, reason)


def flat_scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Flatten a record to tracker names: `train/loss`, `eval/validation/loss`, `train/codebook/entropy/3`.

    Names that contain a slash are used unchanged (the reference prior's names, which existing dashboards expect).
    """
    kind = record["kind"]
    prefix = f"{kind}/{record['split']}" if "split" in record else kind
    hidden = ("kind", "step", "time", "split", "nonfinite")
    complete = {name: value for name, value in record.items() if "/" in name}
    yield from ((name, float(value)) for name, value in complete.items() if isinstance(value, int | float))
    rest = ((name, value) for name, value in record.items() if name not in hidden and name not in complete)
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
                f"train.trackers contains {name!r}, but {MODULES[name]} is not installed. "
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
