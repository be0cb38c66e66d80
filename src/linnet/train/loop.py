"""The training loop: the life of a run from its config to its last checkpoint. `docs/training.md` tells it in words."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import jax
import optax

from linnet import config as configs
from linnet import params as weights
from linnet.config import RunConfig
from linnet.data import Batch, Data, open_data
from linnet.errors import UserError
from linnet.families import registry
from linnet.families.family import Family
from linnet.train import environment, vocabulary
from linnet.train.checkpoint import Checkpoints
from linnet.train.evaluate import Evaluation, evaluate, make_nats
from linnet.train.folder import RunFolder
from linnet.train.interchange import stored_weights
from linnet.train.interrupt import Interrupt, watch
from linnet.train.metrics import MetricsLog, open_trackers, require_trackers
from linnet.train.optim import optimizer as make_optimizer
from linnet.train.optim import schedule
from linnet.train.progress import Progress
from linnet.train.samples import write_sample
from linnet.train.state import TrainState, abstract_state, fresh_buffers, fresh_state, model_weights, start_from
from linnet.train.step import compile_step
from linnet.train.throughput import Meter, matmul_flops
from linnet.train.vocabulary import Vocabulary

log = logging.getLogger("linnet")

# Settings that may change between two parts of one run: they alter neither parameters nor data order.
FREE_TO_CHANGE = {
    "train.log_every",
    "train.eval_every",
    "train.eval_sequences",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.keep",
    "train.max_bad_steps",
    "train.collapse_alarm",
    "train.sample_tokens",
    "train.trackers",
    "optim.extra_steps",
    "preset",
}


class NotFinite(UserError):
    """Too many updates in a row were skipped."""

    exit_code = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int
    finished: bool
    """False: interrupted and saved."""
    evaluation: Evaluation | None
    """Of the last validation, if there was one."""


def train(cfg: RunConfig, folder: RunFolder, *, quiet: bool = False, stop_at: int | None = None) -> Outcome:
    """Trains a run to its end, from its last checkpoint if it has one. `stop_at` ends this part early, saved, as if interrupted."""
    require_trackers(cfg.train.trackers)
    data = open_data(cfg.data, cfg.seed)
    data.must_fit(cfg.model.n_vocab, cfg.model.end_id)
    old = check_folder(cfg, folder)
    if stored_weights.is_weights_alone(folder.path):
        stored_weights.must_be_trainable(folder.path)
    folder.create()
    with folder.lock(), watch() as interrupt:
        vocabulary.keep(folder.path, data)
        if old is None or old != cfg:
            configs.save(cfg, folder.config)
        (folder.path / "environment.json").write_text(json.dumps(environment.describe(), indent=2) + "\n")
        with Checkpoints(folder.checkpoints, keep=cfg.train.keep) as checkpoints:
            return _Run(cfg, folder, data, checkpoints, interrupt, quiet).to_end(stop_at)


def check_folder(cfg: RunConfig, folder: RunFolder) -> RunConfig | None:
    """The config of the run that is there already, if this one may go on with it."""
    if not folder.config.exists():
        return None
    old = configs.load(folder.config)
    changed = sorted(
        name for name, value in _flat(old).items() if value != _flat(cfg)[name] and name not in FREE_TO_CHANGE
    )
    if stored_weights.is_weights_alone(folder.path):  # nothing was trained yet: only the model is settled
        changed = [name for name in changed if name.startswith(("model", "family"))]
    if changed:
        name = changed[0]
        more = f" (and {', '.join(changed[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"{folder.path} holds a run with {name} = {_flat(old)[name]!r}, but you ask for {_flat(cfg)[name]!r}{more}. "
            "Fix: choose another folder with --out, or the same settings to go on with that run."
        )
    return old


def _flat(cfg: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(cfg).items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


class _Run:
    """One part of a run: from where its last checkpoint stands to its end or an interruption."""

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        data: Data,
        checkpoints: Checkpoints,
        interrupt: Interrupt,
        quiet: bool,
    ) -> None:
        self.cfg, self.folder, self.data, self.checkpoints = cfg, folder, data, checkpoints
        self.interrupt, self.quiet = interrupt, quiet
        self.family: Family = registry.get(cfg.family)
        self.optimizer: optax.GradientTransformation = make_optimizer(cfg.optim, self.family.param_specs(cfg.model))
        self.nats = make_nats(self.family, cfg)
        self.saved_at = time.monotonic()
        self.alarmed: set[int] = set()

    def to_end(self, stop_at: int | None) -> Outcome:
        cfg = self.cfg
        state, start = self._restore_or_begin()
        total = cfg.optim.total_steps
        end = total if stop_at is None else min(stop_at, total)
        bytes_per_token = self.data.train.n_bytes / self.data.train.n_tokens
        trackers = open_trackers(cfg.train.trackers, self.folder.path, configs.to_json(cfg), resume_step=start or None)
        with (
            MetricsLog(self.folder.path, trackers) as self.metrics,
            Progress(total, start=start, quiet=self.quiet, bytes_per_token=bytes_per_token) as self.progress,
        ):
            kept = self.metrics.truncate_after(start)
            self._introduce(start)
            evaluation = None
            if start and self._eval_due(start) and not any(r["kind"] == "eval" and r["step"] == start for r in kept):
                evaluation = self._evaluate(
                    state, start
                )  # it was interrupted between its checkpoint and its evaluation
            state, step, latest = self._steps(state, start, end)
            evaluation = latest or evaluation
            self.checkpoints.save(step, state, extra=self._extra(), wait=True)
            if step < total:
                self._event(step, "interrupted", f"Stopped at step {step} of {total}. Run the same command to go on.")
                return Outcome(step=step, finished=False, evaluation=evaluation)
            if step > start and not self._eval_due(step) and self.data.validation.n_windows:
                evaluation = self._evaluate(state, step)
            self._event(step, "finished", f"Finished {total} steps.")
            return Outcome(step=step, finished=True, evaluation=evaluation)

    def _restore_or_begin(self) -> tuple[TrainState, int]:
        if stored_weights.is_weights_alone(self.folder.path):
            given = stored_weights.trainable_weights(self.folder.path, self.family.param_specs(self.cfg.model))
            return start_from(self.family, self.cfg, self.optimizer, given, fresh_buffers(self.family, self.cfg)), 0
        if not self.checkpoints.steps():
            return fresh_state(self.family, self.cfg, self.optimizer), 0
        target = abstract_state(self.family, self.cfg, self.optimizer)
        restored = self.checkpoints.restore(target, set_aside=True)
        theirs = restored.extra.get("data")
        if theirs is not None and theirs != self.data.fingerprint:
            raise UserError(
                f"the data at {self.cfg.data.source!r} is not what this run was trained on (fingerprint {self.data.fingerprint[:12]}, "
                f"the run has {theirs[:12]}), so it cannot be continued exactly. Fix: restore the data, or start a new run with --out."
            )
        return restored.state, restored.step

    def _introduce(self, start: int) -> None:
        count = weights.count(self.family.param_specs(self.cfg.model))
        described = self.data.describe()
        (self.folder.path / "data.json").write_text(json.dumps(described, indent=2) + "\n")
        for warning in described["warnings"]:
            self._event(start, "warning", warning)
        what = "resume" if start else "start"
        self._event(
            start,
            what,
            f"{'Resuming' if start else 'Starting'} at step {start} of {self.cfg.optim.total_steps}: {count:,} parameters, "
            f"{self.data.train.n_tokens:,} training tokens.",
        )

    def _steps(self, state: TrainState, start: int, end: int) -> tuple[TrainState, int, Evaluation | None]:
        """Updates from `start` to `end` or an interruption. The next batch is made while the device works on this one."""
        cfg, evaluation, step = self.cfg, None, start
        if start >= end:
            return state, start, None
        tokens = cfg.data.batch_size * cfg.data.update_len
        meter = Meter(tokens, 3 * self.family.flops_per_token(cfg.model), matmul_flops()[0])
        batch = jax.device_put(self.data.batch(start))
        update = compile_step(self.family, cfg, self.optimizer, state, batch)
        last_metrics: dict[str, jax.Array] | None = None
        while step < end and not self.interrupt.requested:
            state, metrics = update(state, batch)
            step += 1
            if step < end:
                batch, waited = self._next_batch(step)
                meter.stepped(waited)
            else:
                meter.stepped(0.0)
            if last_metrics is not None:  # one update behind, so that reading it never makes the device wait
                self._check_finite(step - 1, last_metrics, state)
            last_metrics = metrics
            if step == start + 1:
                jax.block_until_ready(state.step)  # run once: from here on there is something to save
                meter.read()
                self.interrupt.may_save()
            if step % cfg.train.log_every == 0 or step == cfg.optim.total_steps:
                self._log(step, state, metrics, meter)
            else:
                self.progress.update(step)
            evaluation = self._keep_and_judge(step, state, meter) or evaluation
        if last_metrics is not None:
            self._check_finite(step, last_metrics, state)
        return state, step, evaluation

    def _next_batch(self, step: int) -> tuple[Batch, float]:
        start = time.perf_counter()
        batch = jax.device_put(self.data.batch(step))
        return batch, time.perf_counter() - start

    def _keep_and_judge(self, step: int, state: TrainState, meter: Meter) -> Evaluation | None:
        """Saves when due, and always before evaluating: an evaluation that fails costs nothing."""
        train, start = self.cfg.train, time.perf_counter()
        eval_due = self._eval_due(step)
        minutes = (time.monotonic() - self.saved_at) / 60
        every_steps = train.checkpoint_every and step % train.checkpoint_every == 0
        every_minutes = train.checkpoint_minutes and minutes >= train.checkpoint_minutes
        if not (eval_due or every_steps or every_minutes):
            return None
        self.checkpoints.save(step, state, extra=self._extra())
        self.saved_at = time.monotonic()
        evaluation = self._evaluate(state, step) if eval_due else None
        meter.pause(time.perf_counter() - start)
        return evaluation

    def _eval_due(self, step: int) -> bool:
        every = self.cfg.train.eval_every
        return bool(every) and step % every == 0 and self.data.validation.n_windows > 0

    def _evaluate(self, state: TrainState, step: int) -> Evaluation | None:
        train = self.cfg.train
        params, buffers = model_weights(state)
        n = self.data.validation.n_windows if train.eval_sequences is None else train.eval_sequences
        n_batch = math.ceil(min(n, self.data.validation.n_windows) / self.cfg.data.batch_size)
        stopped = False

        def watched(batches: Iterable[Batch]) -> Iterable[Batch]:
            nonlocal stopped
            for batch in self.progress.track(batches, "validation", n_batch):
                if self.interrupt.requested:
                    stopped = True
                    return
                yield batch

        result = evaluate(
            self.family,
            self.cfg,
            params,
            buffers,
            self.data,
            "validation",
            nats=self.nats,
            limit=train.eval_sequences,
            progress=watched,
        )
        if stopped:  # half an evaluation is none: it is done again when the run goes on
            return None
        self.metrics.write("eval", step, **{k: v for k, v in result.to_json().items() if k != "per_position"})
        self.checkpoints.mark_best(step, result.loss)
        self.progress.say(
            f"step {step}: validation {result.bits_per_byte:.4f} bits per {result.unit} ({result.loss:.4f} nats per token)"
        )
        if train.sample_tokens and not self.interrupt.requested:
            writes = Vocabulary(tokenizer=self.data.tokenizer, shape=self.data.shape)
            write_sample(self.family, self.cfg, params, buffers, writes, self.folder.samples, step, train.sample_tokens)
        return result

    def _log(self, step: int, state: TrainState, metrics: dict[str, jax.Array], meter: Meter) -> None:
        values = {name: jax.device_get(value) for name, value in metrics.items()}
        figures = self.family.diagnostics(state.buffers, metrics, self.cfg.model)
        rates = meter.read()
        nats = float(values["loss_lm_per_token_unscaled"]) / max(float(values["loss_mask_per_token"]), 1e-9)
        per_byte = self.data.train.n_tokens / self.data.train.n_bytes / math.log(2)
        record = {name: value for name, value in values.items() if value.ndim == 0 and name != "loss"}
        self.metrics.write(
            "train",
            step,
            **record,
            loss=nats,
            loss_total=values["loss"],
            **({"loss_commit": values["loss_commit_per_token"]} if "loss_commit_per_token" in values else {}),
            bits_per_byte=nats * per_byte,
            lr=self.cfg.optim.lr * float(schedule(self.cfg.optim)(step - 1)),
            rss_bytes=environment.rss_bytes(),
            **rates,
            **figures,
        )
        self.progress.update(step, loss=nats, tokens_per_second=rates["tokens_per_second"])
        self._watch(step, self.family.alarms(figures, self.cfg.train.collapse_alarm, self.cfg.model))

    def _watch(self, step: int, alarms: dict[int, str]) -> None:
        """Says once when a part of the model collapses, and again only after it has recovered."""
        for unit, words in alarms.items():
            if unit not in self.alarmed:
                self._event(step, "alarm", words)
        self.alarmed = set(alarms)

    def _check_finite(self, step: int, metrics: dict[str, jax.Array], state: TrainState) -> None:
        """Skipped updates are told; too many in a row end the run. Its weights are still good: a bad update never touches them."""
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
            self.checkpoints.save(saved, state, extra=self._extra(), wait=True)
            raise NotFinite(
                f"{bad} updates in a row had a loss or gradient that is not finite, so the run stops at step {step}. The weights of "
                f"the last good update are saved as step {saved}. "
                "Fix: lower --optim.lr, lengthen --optim.warmup-steps, or look at the data with `linnet report`."
            )

    def _extra(self) -> dict[str, Any]:
        return {"data": self.data.fingerprint}

    def _event(self, step: int, event: str, message: str) -> None:
        self.metrics.write("event", step, event=event, message=message)
        self.progress.say(message)
