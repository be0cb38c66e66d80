"""The training loop, from a run's config to its last checkpoint. See `docs/train.md` for an overview."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from linnet.config.schema import RunConfig
from linnet.models import registry
from linnet.optim.lora import trainable_specs
from linnet.optim.optimizer import optimizer
from linnet.parallel import multihost, sharding
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.state import TrainState
from linnet.runs.trackers import require_trackers
from linnet.train import parent as parents
from linnet.train.context import TrainContext
from linnet.train.control_sync import ControlFlags, ControlSync
from linnet.train.evaluation import Evaluator
from linnet.train.exports import Exports, read_exports
from linnet.train.initial_state import make_initial_state, open_folder, open_task, starts_from_parent, with_data_base
from linnet.train.interrupt import handle_signals
from linnet.train.run_log import RunLog, open_log
from linnet.train.step import compile_step
from linnet.train.stragglers import PeerMonitor, monitor
from linnet.train.task import EvalResult, scalars
from linnet.train.throughput import Meter, matmul_flops


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
    cfg = with_data_base(cfg, folder)
    mesh, family = sharding.open_mesh(cfg.mesh), registry.get(cfg.family)
    specs = trainable_specs(family, cfg)  # raises if the adapters do not fit the model
    from_parent = starts_from_parent(cfg, folder)
    task = open_task(cfg, parents.tokenizer_of(cfg) if from_parent else None)
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(handle_signals(may_exit=may_exit))
        multihost.broadcast_from_process0(lambda: open_folder(cfg, folder, task, from_parent=from_parent, stack=stack))
        stack.enter_context(jax.set_mesh(mesh))
        context = TrainContext(
            cfg=cfg,
            folder=folder,
            mesh=mesh,
            family=family,
            optimizer=optimizer(cfg.optim, specs),
            task=task,
            checkpoints=stack.enter_context(Checkpoints(folder.checkpoints, keep=cfg.train.keep)),
            interrupt=interrupt,
        )
        return _train(context, quiet=quiet, stop_at=stop_at, on_step=on_step)


def _train(context: TrainContext, *, quiet: bool, stop_at: int | None, on_step: OnStep | None) -> Outcome:
    """Run one session of a run: from its last checkpoint to its end or an interruption."""
    initial = make_initial_state(context)
    start, total = initial.step, context.cfg.optim.total_steps
    with (
        open_log(context, start, quiet=quiet) as log,
        monitor(
            log=lambda step, message: log.event(step, "straggler", message),
            notify=log.progress.log,
            saved=context.checkpoints.latest,
        ) as peers,
    ):
        exports = Exports(context.cfg, context.folder, lambda step, why: log.event(step, "warning", why))
        evaluator = Evaluator(context, log, exports, start)
        log.start(initial)
        evaluation = None
        if start or context.cfg.parent is not None:
            evaluation = evaluator.complete(initial.state, start, pending=initial.eval_pending)
        loop = _Loop(context, log, evaluator, exports, peers, on_step)
        state, step, latest = loop.run(initial.state, start, total if stop_at is None else min(stop_at, total))
        evaluation = latest or evaluation
        context.save(step, state, wait=True)
        exports.write("latest", state, step)
        context.allow_exit_after_last(step)
        if step < total:
            log.event(step, "interrupted", f"Stopped at step {step} of {total}. Run the same command to resume.")
            return Outcome(step=step, finished=False, evaluation=evaluation)
        evaluation = evaluator.finish(state, step) or evaluation
        log.event(step, "finished", f"Finished {total} steps.")
        return Outcome(step=step, finished=True, evaluation=evaluation)


class _Loop:
    """The updates of a session, with the checkpoints and evaluations that are due between them."""

    def __init__(
        self,
        context: TrainContext,
        log: RunLog,
        evaluator: Evaluator,
        exports: Exports,
        peers: PeerMonitor,
        on_step: OnStep | None,
    ) -> None:
        self._context, self._log, self._evaluator, self._exports = context, log, evaluator, exports
        self._peers, self._on_step = peers, on_step
        self._control = ControlSync(context.mesh)
        self._batch_slice = sharding.process_batch_slice(
            context.cfg.data.batch_size, context.mesh, context.family.rules
        )
        self._saved_at = time.monotonic()

    def run(self, state: TrainState, start: int, end: int) -> tuple[TrainState, int, EvalResult | None]:
        """Run updates from `start` to `end` or an interruption. The next batch is prepared while the device runs this one.

        Returns the state, its step and the last evaluation. `state` is donated.
        """
        context, cfg, evaluation, step = self._context, self._context.cfg, None, start
        if start >= end:
            return state, start, None
        meter = Meter(context.task.n_per_update, 3 * context.family.flops_per_token(cfg.model), matmul_flops()[0])
        batch, _ = self._next_batch(start)
        update = compile_step(context.family, cfg, context.optimizer, state, batch, context.mesh)
        last_metrics: dict[str, jax.Array] | None = None
        while step < end and not self._control.stops(context.interrupt.requested):
            state, metrics = update(state, batch)
            step += 1
            if step < end:
                batch, waited = self._next_batch(step)
                meter.stepped(waited)
                self._peers.stepped(step, waited)
            else:
                meter.stepped(0.0)
            if last_metrics is not None:  # one update behind, so that reading it never stalls the device
                self._finish_step(step - 1, last_metrics, state)
            last_metrics = metrics
            if step == start + 1:
                jax.block_until_ready(state.step)  # the first update is done: there is something to save
                meter.read()
                context.interrupt.may_save()
            if step % cfg.train.log_every == 0 or step == cfg.optim.total_steps:
                self._log.train_step(step, state, metrics, meter)
            else:
                self._log.progress.update(step)
            evaluation = self._save_and_evaluate_if_due(step, state, meter) or evaluation
        if last_metrics is not None:
            self._finish_step(step, last_metrics, state)
        return state, step, evaluation

    def _next_batch(self, step: int) -> tuple[Any, float]:
        """Return the batch of a step on the devices, and the seconds that it took."""
        start, context = time.perf_counter(), self._context
        rows = context.task.batch(step, *self._batch_slice)
        size = context.cfg.data.batch_size
        batch = sharding.global_batch(rows, self._batch_slice, size, context.mesh, context.family.rules)
        return batch, time.perf_counter() - start

    def _finish_step(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> None:
        self._log.check_finite(step, metrics, state)
        if self._on_step is not None:
            values = jax.device_get(metrics)
            # The loss does not depend on the throughput, which is not measured here.
            loss = self._context.task.train_metrics(step, values, defaultdict(float)).loss
            plain = {name: float(value) for name, value in scalars(values).items()}
            self._on_step(step, {**plain, "loss_total": float(values["loss"]), "loss": loss})

    def _save_and_evaluate_if_due(self, step: int, state: TrainState, meter: Meter) -> EvalResult | None:
        """Save and evaluate when due. A checkpoint is always saved before evaluating, so a failed evaluation loses nothing."""
        context, start = self._context, time.perf_counter()
        cfg = context.cfg.train
        minutes = (time.monotonic() - self._saved_at) / 60
        flags = ControlFlags(
            stop=context.interrupt.requested,
            save=bool(cfg.checkpoint_minutes) and minutes >= cfg.checkpoint_minutes,
            evaluate=self._evaluator.is_due_by_time(),
        )
        agreed = self._control.decide(flags)
        evaluates = self._evaluator.is_due(step) or agreed.evaluate
        saves = cfg.checkpoint_every and step % cfg.checkpoint_every == 0
        if not (evaluates or saves or agreed.save):
            return None
        is_last = step >= context.cfg.optim.total_steps
        context.save(step, state, wait=is_last, evaluate=evaluates)
        self._exports.write("latest", state, step)
        context.allow_exit_after_last(step)
        self._saved_at = time.monotonic()
        evaluation = self._evaluator.evaluate(state, step) if evaluates else None
        meter.pause(time.perf_counter() - start)
        return evaluation
