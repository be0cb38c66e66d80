"""Evaluations of a training session: the metrics, the best checkpoint, the sample and the final test.

An evaluation writes several files. If the run is killed in between, a resume completes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

from linnet.parallel import multihost
from linnet.runs import base_weights
from linnet.runs.state import TrainState, abstract_state, evaluated_weights
from linnet.train.context import TrainContext
from linnet.train.exports import Exports
from linnet.train.run_log import RunLog
from linnet.train.task import EvalResult, Interrupted


class Evaluator:
    def __init__(self, context: TrainContext, log: RunLog, exports: Exports, start: int) -> None:
        """Recover the evaluations recorded up to step `start`. All processes must call it together."""
        self._context, self._log, self._exports = context, log, exports
        recorded, self._has_sample, self._is_tested = multihost.broadcast_from_process0(lambda: self._recover(start))
        self._evaluated = set(recorded)
        """Steps whose evaluation is in metrics.jsonl."""
        self._evaluated_at = time.monotonic()

    def _recover(self, start: int) -> tuple[list[int], bool, bool]:
        """Drop metrics recorded after `start`, and mark the best of the evaluations recorded up to it.

        The last evaluation may have been interrupted before it was marked. Returns the evaluated steps, whether the sample of
        `start` was written, and whether the run was tested.
        """
        records = self._log.metrics.truncate_after(start)
        losses = {record["step"]: record.get("loss") for record in records if record["kind"] == "eval"}
        self._context.checkpoints.set_losses(losses, last=start)
        has_sample = self._context.task.has_sample(start, self._context.folder.samples)
        return list(losses), has_sample, any(record["kind"] == "test" for record in records)

    def is_due(self, step: int) -> bool:
        every = self._context.cfg.train.eval_every
        return bool(every) and step % every == 0 and self._context.task.n_validation > 0

    def is_due_by_time(self) -> bool:
        minutes = self._context.cfg.train.eval_minutes
        elapsed = (time.monotonic() - self._evaluated_at) / 60
        return bool(minutes) and elapsed >= minutes and self._context.task.n_validation > 0

    def complete(self, state: TrainState, start: int, *, pending: bool) -> EvalResult | None:
        """Complete the evaluation at `start` if it was interrupted after its checkpoint was saved.

        `pending`: whether that checkpoint was saved for an evaluation.
        """
        if start in self._evaluated:
            if self._context.checkpoints.best() == start:
                self._exports.write("best", state, start)
            if not self._has_sample:
                self._write_sample(state, start)
            return None
        # Fine-tuning evaluates step 0 as the parent's baseline, regardless of eval_every.
        is_baseline = not start and self._context.task.n_validation > 0
        return self.evaluate(state, start) if self.is_due(start) or pending or is_baseline else None

    def evaluate(self, state: TrainState, step: int) -> EvalResult | None:
        """Evaluate, record the result, mark the best checkpoint and write a sample. Returns None if interrupted."""
        context = self._context
        try:
            result = context.task.evaluate(state, self._track)
        except Interrupted:
            return None
        self._evaluated_at = time.monotonic()
        self._log.metrics.write("eval", step, **result.metrics)
        self._evaluated.add(step)
        lowest = context.checkpoints.best_loss()
        context.checkpoints.mark_best(step, result.loss)
        if lowest is None or result.loss < lowest:
            self._exports.write("best", state, step)
        self._log.progress.log(f"step {step}: {result.summary}")
        self._write_sample(state, step)
        return result

    def finish(self, state: TrainState, step: int) -> EvalResult | None:
        """Evaluate the last step, and test the run, unless already done."""
        task = self._context.task
        result = self.evaluate(state, step) if task.n_validation and step not in self._evaluated else None
        if task.n_test and not self._is_tested:
            self._test(state, step)
        return result

    def _test(self, state: TrainState, step: int) -> None:
        """Test the best checkpoint, which need not be that of the last step."""
        context = self._context
        best = multihost.broadcast_from_process0(context.checkpoints.best)
        if best is not None and best != step:
            target = evaluated_weights(abstract_state(context.family, context.cfg, context.optimizer, context.mesh))
            state = base_weights.restore(context.folder.path, context.checkpoints, target, "best", partial=True).state
        with contextlib.suppress(Interrupted):
            result = context.task.test(state, step if best is None else best, context.folder.path, self._track)
            self._log.metrics.write("test", step, **result.metrics)
            self._log.progress.log(result.summary)

    def _write_sample(self, state: TrainState, step: int) -> None:
        if not self._context.is_any_interrupted():
            self._context.task.write_sample(state, step, self._context.folder.samples)

    def _track(self, batches: Iterable[Any], label: str, n_batch: int) -> Iterable[Any]:
        """Iterate over batches with a progress display. Raises `Interrupted` when any process was asked to stop."""
        for batch in self._log.progress.track(batches, label, n_batch):
            if self._context.is_any_interrupted():
                raise Interrupted
            yield batch
