"""The log of a training session: metrics and events in metrics.jsonl and the trackers, and lines on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from linnet.config import codec
from linnet.core import params as weights
from linnet.core.errors import UserError
from linnet.data.sources.locations import absolute_paths
from linnet.optim.lora import trainable_specs
from linnet.optim.optimizer import schedule
from linnet.parallel import multihost
from linnet.runs import environment
from linnet.runs.metrics import MetricsLog, NoMetrics
from linnet.runs.state import TrainState
from linnet.runs.trackers import open_trackers
from linnet.train.context import TrainContext
from linnet.train.initial_state import InitialState, write_json
from linnet.train.progress import Progress
from linnet.train.throughput import Meter


class NotFinite(UserError):
    """Raised when too many consecutive updates were skipped."""

    exit_code = 3


@contextlib.contextmanager
def open_log(context: TrainContext, start: int, *, quiet: bool) -> Iterator[RunLog]:
    """Open the log of a session that starts at step `start`. Only process 0 writes metrics and shows progress."""
    task, is_first = context.task, multihost.is_process0()
    with (
        _open_metrics(context, start) if is_first else NoMetrics() as metrics,
        Progress(
            context.cfg.optim.total_steps,
            start=start,
            quiet=quiet or not is_first,
            bits_per_nat=task.bits_per_nat,
            unit=task.unit,
        ) as progress,
    ):
        yield RunLog(context, metrics, progress)


def _open_metrics(context: TrainContext, start: int) -> MetricsLog:
    names, path = context.cfg.train.trackers, context.folder.path
    trackers = open_trackers(names, path, codec.to_json(context.cfg), resume_step=start or None)
    return MetricsLog(path, trackers)


class RunLog:
    def __init__(self, context: TrainContext, metrics: MetricsLog | NoMetrics, progress: Progress) -> None:
        self.metrics, self.progress = metrics, progress
        self._context, self._collapsed = context, set[int]()

    def event(self, step: int, event: str, message: str) -> None:
        """Record an event of the run, and print its message."""
        self.metrics.write("event", step, event=event, message=message)
        self.progress.log(message)

    def start(self, initial: InitialState) -> None:
        """Write data.json, and log the warnings about the data and what is trained, on what, and from which weights."""
        context, start = self._context, initial.step
        cfg, family = context.cfg, context.family
        paths = {"source": cfg.data.source, "paths": absolute_paths(cfg.data)}
        described = context.task.describe() | paths
        if multihost.is_process0():
            write_json(context.folder.path / "data.json", described)
        for warning in described["warnings"]:
            self.event(start, "warning", warning)
        size = f"{weights.count(family.param_specs(cfg.model)):,} parameters"
        if cfg.lora.rank:
            size = f"{weights.count(trainable_specs(family, cfg)):,} of {size} trained"
        amount = f"{size}, {context.task.describe_amount()}{self._describe_mesh()}"
        at = f"at step {start} of {cfg.optim.total_steps}"
        if start:
            self.event(start, "resume", f"Resuming {at}: {amount}.")
        else:
            self.event(start, "start", f"Starting {at} from {initial.origin}: {amount}.")

    def _describe_mesh(self) -> str:
        n = self._context.mesh.size
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f", {n} devices{processes} ({self._context.cfg.mesh})" if n > 1 else ""

    def train_step(self, step: int, state: TrainState, metrics: dict[str, jax.Array], meter: Meter) -> None:
        """Log the metrics of an update, and warn of parts of the model that have collapsed."""
        context, cfg = self._context, self._context.cfg
        values: dict[str, Any] = {name: jax.device_get(value) for name, value in metrics.items()}
        stats = context.family.diagnostics(state.buffers, metrics, cfg.model)
        logged = context.task.train_metrics(step, values, meter.read())
        self.metrics.write(
            "train",
            step,
            **logged.metrics,
            lr=cfg.optim.lr * float(schedule(cfg.optim)(step - 1)),
            rss_bytes=environment.rss_bytes(),
            **stats,
        )
        self.progress.update(step, loss=logged.loss, per_second=logged.per_second)
        self._warn_of_collapse(step, context.family.collapse_warnings(stats, cfg.train.collapse_alarm, cfg.model))

    def _warn_of_collapse(self, step: int, warnings: dict[int, str]) -> None:
        """Log a warning when a part of the model collapses; log it again only after that part has recovered."""
        for part, message in warnings.items():
            if part not in self._collapsed:
                self.event(step, "alarm", message)
        self._collapsed = set(warnings)

    def check_finite(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> None:
        """Log a skipped update, and stop the run after too many in a row. Skipped updates never change the weights."""
        consecutive = int(metrics["bad_run"])
        if not consecutive:
            return
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self.event(step, "skipped", f"Update {step} was skipped: loss {loss}, gradient norm {norm}.")
        if consecutive >= self._context.cfg.train.max_bad_steps:
            self.event(step, "failed", f"{consecutive} updates in a row were not finite.")
            saved = int(state.step)
            self._context.save(saved, state, wait=True)
            raise NotFinite(
                f"{consecutive} updates in a row had a loss or gradient that is not finite, so the run stops at step {step}. The "
                f"weights of the last good update are saved as step {saved}. "
                "Fix: lower --optim.lr, lengthen --optim.warmup-steps, or look at the data with `linnet report`."
            )
