"""The training loop, from a run's config to its last checkpoint. See `docs/train.md` for an overview."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core import params as weights
from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write, remove_parts
from linnet.data.sources.locations import absolute_paths, with_base
from linnet.models import registry
from linnet.models.base import ModelFamily
from linnet.optim.lora import trainable_specs
from linnet.optim.optimizer import optimizer as make_optimizer
from linnet.optim.optimizer import schedule
from linnet.parallel import multihost, sharding
from linnet.runs import base_weights, environment, stored_trainer
from linnet.runs import weights as stored_weights
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.metrics import MetricsLog, NoMetrics, open_trackers, require_trackers
from linnet.runs.state import TrainState, abstract_state, both_weights, fresh_state
from linnet.train import parent as parents
from linnet.train.control_sync import ControlFlags, ControlSync
from linnet.train.exports import Exports, read_exports
from linnet.train.interrupt import Interrupt, watch
from linnet.train.progress import Progress
from linnet.train.resume import check_resumable
from linnet.train.step import compile_step
from linnet.train.stragglers import monitor
from linnet.train.task import EvalResult, Interrupted, Task, scalars
from linnet.train.tasks import open_task
from linnet.train.throughput import Meter, matmul_flops

log = logging.getLogger("linnet")


class NotFinite(UserError):
    """Raised when too many consecutive updates were skipped."""

    exit_code = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    finished: bool
    """False if the run was interrupted (its state is saved)."""
    evaluation: EvalResult | None
    """Result of the last validation, if there was one."""


OnStep = Callable[[int, dict[str, float]], None]
"""Called with each completed step and its scalar metrics, such as `grad_norm` and the `loss` that is also logged."""


def train(
    cfg: RunConfig,
    folder: RunFolder,
    *,
    quiet: bool = False,
    stop_at: int | None = None,
    on_step: OnStep | None = None,
    may_exit: bool = True,
) -> Outcome:
    """Train a run to completion, resuming from its last checkpoint if it has one.

    `stop_at` stops and saves at that step, as an interruption would. `may_exit`: whether a signal may end the process when there is
    nothing to save; otherwise Ctrl-C then raises KeyboardInterrupt.
    """
    require_trackers(cfg.train.trackers)
    read_exports(cfg)
    cfg = _with_base(cfg, folder)
    mesh = sharding.open_mesh(cfg.mesh)
    trainable_specs(registry.get(cfg.family), cfg)  # raises if the adapters do not fit the model
    begins = starts_from_parent(cfg, folder)
    task = open_task(cfg, parents.tokenizer_of(cfg) if begins else None)
    with contextlib.ExitStack() as stack:

        def open_folder() -> None:
            """Check and create the run folder on process 0. The other processes write only their shards of checkpoints."""
            old = check_resumable(cfg, folder, task.fingerprint)
            is_import = stored_weights.is_weights_only(folder.path)
            if begins:
                parents.check_parent(cfg)
                described = task.describe()
                parents.check_kind(cfg, described.get("kind"))
                parents.check_file_tokenizer(cfg, described.get("tokenizer"))
            elif is_import and not cfg.lora.rank:
                stored_weights.check_trainable(folder.path)
                if stored_trainer.has_trainer(folder.path):
                    stored_trainer.check_trainer(folder.path, cfg)
            folder.create()
            stack.enter_context(folder.lock())
            for name in ("config.json", "environment.json", "data.json", "metrics.jsonl"):
                remove_parts(folder.path / name)
            task.keep(folder.path)
            # An import's config may predate some settings, and would be read differently once there are checkpoints.
            if is_import or old is None or old != cfg:
                codec.save(cfg, folder.config)
            _write_json(folder.path / "environment.json", environment.describe())

        interrupt = stack.enter_context(watch(may_exit=may_exit))
        multihost.broadcast_from_process0(open_folder)
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, keep=cfg.train.keep))
        quiet = quiet or not _is_first()
        return _Run(cfg, folder, mesh, task, checkpoints, interrupt, quiet, on_step).to_end(stop_at)


def _with_base(cfg: RunConfig, folder: RunFolder) -> RunConfig:
    """Resolve relative data paths against the working directory, else against the base recorded by the existing run."""
    found = with_base(cfg)
    if found.data.base is None and folder.config.exists():
        base = codec.load(folder.config).data.base
        return dataclasses.replace(found, data=dataclasses.replace(found.data, base=base))
    return found


def starts_from_parent(cfg: RunConfig, folder: RunFolder) -> bool:
    """Whether the run has yet to read its parent's weights. Once it has a checkpoint (step 0), it no longer needs the parent."""
    if stored_weights.is_weights_only(folder.path) or Checkpoints(folder.checkpoints, keep=1).steps():
        return False
    if cfg.lora.rank and cfg.parent is None:
        fix = "add --from RUN, or leave --lora.rank out"
        raise invalid("lora.rank", cfg.lora.rank, "used with --from: adapters need weights to adapt", fix)
    return cfg.parent is not None


def _is_first() -> bool:
    """Whether this is process 0, which writes the run's files."""
    return jax.process_index() == 0


def _write_json(path: Path, values: dict[str, Any]) -> None:
    atomic_write(path, (json.dumps(values, indent=2) + "\n").encode(), sync=True)


class _Run:
    """One session of a run: from its last checkpoint to its end or an interruption."""

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        mesh: Mesh,
        task: Task,
        checkpoints: Checkpoints,
        interrupt: Interrupt,
        quiet: bool,
        on_step: OnStep | None,
    ) -> None:
        self.cfg, self.folder, self.mesh, self.task, self.checkpoints = cfg, folder, mesh, task, checkpoints
        self.interrupt, self.quiet, self.on_step = interrupt, quiet, on_step
        self.control = ControlSync(mesh)
        self.family: ModelFamily = registry.get(cfg.family)
        self.optimizer: optax.GradientTransformation = make_optimizer(cfg.optim, trainable_specs(self.family, cfg))
        self.exports = Exports(cfg, folder, lambda step, why: self._event(step, "warning", why))
        self.share = sharding.process_batch_slice(cfg.data.batch_size, mesh, self.family.rules)
        self.saved_at = self.evaluated_at = time.monotonic()
        self.alarmed: set[int] = set()
        parent = cfg.parent
        self.origin = (
            "imported weights" if parent is None else f"{parent.path} (step {parent.step}, {parent.fingerprint[:12]})"
        )
        self.evaluated: set[int] = set()
        """Steps whose evaluation is in metrics.jsonl."""
        self.eval_pending = False
        """Whether the checkpoint being resumed was saved for an evaluation that its step number does not imply (eval_minutes)."""

    def to_end(self, stop_at: int | None) -> Outcome:
        cfg = self.cfg
        state, start = self._restore_or_begin()
        total = cfg.optim.total_steps
        end = total if stop_at is None else min(stop_at, total)
        with (
            self._open_metrics(start) as self.metrics,
            Progress(
                total, start=start, quiet=self.quiet, bits_per_nat=self.task.bits_per_nat, unit=self.task.unit
            ) as self.progress,
            monitor(
                log=lambda step, words: self._event(step, "straggler", words),
                notify=self.progress.log,
                saved=self.checkpoints.latest,
            ) as self.peers,
        ):
            evaluated, has_sample, tested = multihost.broadcast_from_process0(lambda: self._recover(start))
            self.evaluated = set(evaluated)
            self._introduce(start)
            evaluation = None
            if start or self.cfg.parent is not None:  # fine-tuning evaluates step 0 as the parent's baseline
                evaluation = self._finish_evaluation(state, start, has_sample)
            state, step, latest = self._steps(state, start, end)
            evaluation = latest or evaluation
            self._save(step, state, wait=True)
            self.exports.write("latest", state, step)
            self._all_saved(step)
            if step < total:
                self._event(step, "interrupted", f"Stopped at step {step} of {total}. Run the same command to go on.")
                return Outcome(step=step, finished=False, evaluation=evaluation)
            if self.task.n_validation and step not in self.evaluated:
                evaluation = self._evaluate(state, step)
            if self.task.n_test and not tested:
                self._test(state, step)
            self._event(step, "finished", f"Finished {total} steps.")
            return Outcome(step=step, finished=True, evaluation=evaluation)

    def _open_metrics(self, start: int) -> MetricsLog | NoMetrics:
        if not _is_first():
            return NoMetrics()
        trackers = self.cfg.train.trackers
        named = open_trackers(trackers, self.folder.path, codec.to_json(self.cfg), resume_step=start or None)
        return MetricsLog(self.folder.path, named)

    def _recover(self, start: int) -> tuple[list[int], bool, bool]:
        """Drop metrics recorded after `start`, and mark the best of the evaluations recorded up to it.

        The last evaluation may have been interrupted before it was marked. Returns the evaluated steps, whether the sample of
        `start` was written, and whether the run was tested.
        """
        kept = self.metrics.truncate_after(start)
        losses = {record["step"]: record.get("loss") for record in kept if record["kind"] == "eval"}
        self.checkpoints.set_losses(losses, last=start)
        has_sample = self.task.has_sample(start, self.folder.samples)
        return list(losses), has_sample, any(record["kind"] == "test" for record in kept)

    def _finish_evaluation(self, state: TrainState, start: int, has_sample: bool) -> EvalResult | None:
        """Complete the evaluation at `start` if it was interrupted after its checkpoint was saved."""
        if start in self.evaluated:
            if self.checkpoints.best() == start:
                self.exports.write("best", state, start)
            if not has_sample:
                self._show(state, start)
            return None
        parent_due = not start and self.task.n_validation > 0  # regardless of eval_every
        return self._evaluate(state, start) if self._eval_due(start) or self.eval_pending or parent_due else None

    def _restore_or_begin(self) -> tuple[TrainState, int]:
        """Return the state to continue from and its step. Sets `self.origin`, a description of where its weights came from."""
        if stored_weights.is_weights_only(self.folder.path):
            if stored_trainer.has_trainer(self.folder.path) and not self.cfg.lora.rank:
                self.origin = "an imported trainer checkpoint"
                state, step = stored_trainer.continue_from(
                    self.folder.path, self.family, self.cfg, self.optimizer, self.mesh
                )
                self._save(step, state, wait=True)  # an evaluation at this step marks its checkpoint
                return state, step
            self.origin = "imported weights"
            return self._begun(
                parents.begin_from_weights(self.family, self.cfg, self.optimizer, self.mesh, self.folder.path)
            )
        if multihost.broadcast_from_process0(lambda: not self.checkpoints.steps()):
            if self.cfg.parent is not None:
                return self._begun(parents.begin(self.family, self.cfg, self.optimizer, self.mesh))
            self.origin = f"random weights (seed {self.cfg.seed})"
            return fresh_state(self.family, self.cfg, self.optimizer, self.mesh), 0
        target = abstract_state(self.family, self.cfg, self.optimizer, self.mesh)
        restored = base_weights.restore(self.folder.path, self.checkpoints, target, set_aside=True)
        theirs = restored.extra.get("data")
        if theirs is not None and theirs != self.task.fingerprint:
            raise UserError(
                f"the data at {self.cfg.data.source!r} is not what this run was trained on (fingerprint "
                f"{self.task.fingerprint[:12]}, the run has {theirs[:12]}), so it cannot be continued exactly. "
                "Fix: restore the data, or name an unchanged copy of it with --data.source; to train on it as it is now, "
                f"`linnet train --from {self.folder.path} --data.source {self.cfg.data.source} --out ANOTHER`."
            )
        self.eval_pending = bool(restored.extra.get("evaluate"))
        return restored.state, restored.step

    def _begun(self, state: TrainState) -> tuple[TrainState, int]:
        """Save step 0 if it was made from files outside the run, so that the run no longer depends on them."""
        if state.base is not None:
            base_weights.store(self.folder.path, state.base)
        if self.cfg.parent is not None or state.base is not None:
            self._save(0, state, wait=True)
        return state, 0

    def _save(self, step: int, state: TrainState, *, wait: bool = False, evaluate: bool = False) -> None:
        extra = {"data": self.task.fingerprint, "evaluate": evaluate}
        self.checkpoints.save(step, base_weights.without_base(state), extra=extra, wait=wait)

    def _all_saved(self, step: int) -> None:
        """After the last checkpoint, let a signal end a single process at once; a resume then repeats the evaluation.

        Several processes must agree first, which they do between two batches of the evaluation.
        """
        if step >= self.cfg.optim.total_steps and jax.process_count() == 1:
            self.interrupt.all_saved()

    def _introduce(self, start: int) -> None:
        count = weights.count(self.family.param_specs(self.cfg.model))
        amount = f"{count:,} parameters"
        if self.cfg.lora.rank:
            amount = f"{weights.count(trainable_specs(self.family, self.cfg)):,} of {amount} trained"
        paths = {"source": self.cfg.data.source, "paths": absolute_paths(self.cfg.data)}
        described = self.task.describe() | paths
        if _is_first():
            _write_json(self.folder.path / "data.json", described)
        for warning in described["warnings"]:
            self._event(start, "warning", warning)
        what = "resume" if start else "start"
        self._event(
            start,
            what,
            f"{'Resuming' if start else 'Starting'} at step {start} of {self.cfg.optim.total_steps}"
            f"{'' if start else f' from {self.origin}'}: {amount}, {self.task.amount()}{self._spread()}.",
        )

    def _spread(self) -> str:
        n = self.mesh.size
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f", {n} devices{processes} ({self.cfg.mesh})" if n > 1 else ""

    def _steps(self, state: TrainState, start: int, end: int) -> tuple[TrainState, int, EvalResult | None]:
        """Run updates from `start` to `end` or an interruption. The next batch is prepared while the device runs this one."""
        cfg, evaluation, step = self.cfg, None, start
        if start >= end:
            return state, start, None
        meter = Meter(self.task.n_per_update, 3 * self.family.flops_per_token(cfg.model), matmul_flops()[0])
        batch, _ = self._next_batch(start)
        update = compile_step(self.family, cfg, self.optimizer, state, batch, self.mesh)
        last_metrics: dict[str, jax.Array] | None = None
        while step < end and not self.control.stops(self.interrupt.requested):
            state, metrics = update(state, batch)
            step += 1
            if step < end:
                batch, waited = self._next_batch(step)
                meter.stepped(waited)
                self.peers.stepped(step, waited)
            else:
                meter.stepped(0.0)
            if last_metrics is not None:  # one update behind, so that reading it never stalls the device
                self._finish_step(step - 1, last_metrics, state)
            last_metrics = metrics
            if step == start + 1:
                jax.block_until_ready(state.step)  # the first update is done: there is something to save
                meter.read()
                self.interrupt.may_save()
            if step % cfg.train.log_every == 0 or step == cfg.optim.total_steps:
                self._log(step, state, metrics, meter)
            else:
                self.progress.update(step)
            evaluation = self._keep_and_judge(step, state, meter) or evaluation
        if last_metrics is not None:
            self._finish_step(step, last_metrics, state)
        return state, step, evaluation

    def _finish_step(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> None:
        self._check_finite(step, metrics, state)
        if self.on_step is not None:
            values = jax.device_get(metrics)
            loss = self.task.logged(step, values, defaultdict(float)).loss  # without throughput, which it does not need
            plain = {name: float(value) for name, value in scalars(values).items()}
            self.on_step(step, {**plain, "loss_total": float(values["loss"]), "loss": loss})

    def _next_batch(self, step: int) -> tuple[Any, float]:
        start = time.perf_counter()
        rows = self.task.batch(step, *self.share)
        batch = sharding.global_batch(rows, self.share, self.cfg.data.batch_size, self.mesh, self.family.rules)
        return batch, time.perf_counter() - start

    def _keep_and_judge(self, step: int, state: TrainState, meter: Meter) -> EvalResult | None:
        """Save and evaluate when due. A checkpoint is always saved before evaluating, so a failed evaluation loses nothing."""
        train, start = self.cfg.train, time.perf_counter()
        minutes, since_evaluation = (time.monotonic() - self.saved_at) / 60, (time.monotonic() - self.evaluated_at) / 60
        by_minutes = train.eval_minutes and since_evaluation >= train.eval_minutes and self.task.n_validation
        every_minutes = train.checkpoint_minutes and minutes >= train.checkpoint_minutes
        flags = ControlFlags(stop=self.interrupt.requested, save=bool(every_minutes), evaluate=bool(by_minutes))
        agreed = self.control.decide(flags)
        eval_due = self._eval_due(step) or agreed.evaluate
        every_steps = train.checkpoint_every and step % train.checkpoint_every == 0
        if not (eval_due or every_steps or agreed.save):
            return None
        last = step >= self.cfg.optim.total_steps
        self._save(step, state, wait=last, evaluate=bool(eval_due))
        self.exports.write("latest", state, step)
        self._all_saved(step)
        self.saved_at = time.monotonic()
        evaluation = self._evaluate(state, step) if eval_due else None
        meter.pause(time.perf_counter() - start)
        return evaluation

    def _eval_due(self, step: int) -> bool:
        every = self.cfg.train.eval_every
        return bool(every) and step % every == 0 and self.task.n_validation > 0

    def _evaluate(self, state: TrainState, step: int) -> EvalResult | None:
        """Evaluate, record the result, mark the best checkpoint and write a sample.

        If the run is killed in between, the remaining steps are done on resume (`_recover`, `_finish_evaluation`).
        """
        try:
            result = self.task.evaluate(state, self._watched)
        except Interrupted:
            return None
        self.evaluated_at = time.monotonic()
        self.metrics.write("eval", step, **result.record)
        self.evaluated.add(step)
        lowest = self.checkpoints.best_loss()
        self.checkpoints.mark_best(step, result.loss)
        if lowest is None or result.loss < lowest:
            self.exports.write("best", state, step)
        self.progress.log(f"step {step}: {result.summary}")
        self._show(state, step)
        return result

    def _show(self, state: TrainState, step: int) -> None:
        if not any(multihost.all_gather_json(self.interrupt.requested)):
            self.task.show(state, step, self.folder.samples)

    def _test(self, state: TrainState, step: int) -> None:
        """Test the best checkpoint, which need not be that of the last step."""
        best = multihost.broadcast_from_process0(self.checkpoints.best)
        if best is not None and best != step:
            target = both_weights(abstract_state(self.family, self.cfg, self.optimizer, self.mesh))
            state = base_weights.restore(self.folder.path, self.checkpoints, target, "best", partial=True).state
        with contextlib.suppress(Interrupted):
            result = self.task.test(state, step if best is None else best, self.folder.path, self._watched)
            self.metrics.write("test", step, **result.record)
            self.progress.log(result.summary)

    def _watched(self, batches: Iterable[Any], label: str, n_batch: int) -> Iterable[Any]:
        for batch in self.progress.track(batches, label, n_batch):
            if any(multihost.all_gather_json(self.interrupt.requested)):
                raise Interrupted
            yield batch

    def _log(self, step: int, state: TrainState, metrics: dict[str, jax.Array], meter: Meter) -> None:
        values = {name: jax.device_get(value) for name, value in metrics.items()}
        figures = self.family.diagnostics(state.buffers, metrics, self.cfg.model)
        logged = self.task.logged(step, values, meter.read())
        self.metrics.write(
            "train",
            step,
            **logged.record,
            lr=self.cfg.optim.lr * float(schedule(self.cfg.optim)(step - 1)),
            rss_bytes=environment.rss_bytes(),
            **figures,
        )
        self.progress.update(step, loss=logged.loss, per_second=logged.per_second)
        self._watch(step, self.family.collapse_warnings(figures, self.cfg.train.collapse_alarm, self.cfg.model))

    def _watch(self, step: int, warnings: dict[int, str]) -> None:
        """Log an alarm when a part of the model collapses; log it again only after that part has recovered."""
        for unit, words in warnings.items():
            if unit not in self.alarmed:
                self._event(step, "alarm", words)
        self.alarmed = set(warnings)

    def _check_finite(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> None:
        """Log a skipped update, and stop the run after too many in a row. Skipped updates never change the weights."""
        bad = int(metrics["bad_run"])
        if not bad:
            return
        self._event(
            step,
            "skipped",
            f"Update {step} was skipped: loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}.",
        )
        if bad >= self.cfg.train.max_bad_steps:
            self._event(step, "failed", f"{bad} updates in a row were not finite.")
            saved = int(state.step)
            self._save(saved, state, wait=True)
            raise NotFinite(
                f"{bad} updates in a row had a loss or gradient that is not finite, so the run stops at step {step}. The weights of "
                f"the last good update are saved as step {saved}. "
                "Fix: lower --optim.lr, lengthen --optim.warmup-steps, or look at the data with `linnet report`."
            )

    def _event(self, step: int, event: str, message: str) -> None:
        self.metrics.write("event", step, event=event, message=message)
        self.progress.log(message)
