"""The start of a training session: its task, its run folder, and its state (new, restored, from a parent or from an import)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write, remove_parts
from linnet.data.sources.locations import with_base
from linnet.parallel import multihost
from linnet.runs import base_weights, environment, stored_trainer
from linnet.runs import weights as stored_weights
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.state import TrainState, abstract_state, fresh_state
from linnet.tokenizers.base import Tokenizer
from linnet.train import parent as parents
from linnet.train.context import TrainContext
from linnet.train.resume import check_resumable
from linnet.train.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialState:
    state: TrainState
    step: int
    origin: str
    """Where the weights came from, for the log."""
    eval_pending: bool = False
    """Whether the restored checkpoint was saved for an evaluation that its step number does not imply (eval_minutes)."""


def with_data_base(cfg: RunConfig, folder: RunFolder) -> RunConfig:
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


def open_task(cfg: RunConfig, tokenizer: Tokenizer | None = None) -> Task:
    """Open the run's data and return its task. Raises if the data does not fit the run.

    `tokenizer`: the tokenizer that the data must have been made with, if the run has none of its own yet.
    """
    if not cfg.reads_tokens:
        from linnet.train.prior_task import PriorTask

        return PriorTask(cfg)
    from linnet.train.lm_task import LMTask

    return LMTask(cfg, tokenizer)


def open_folder(
    cfg: RunConfig, folder: RunFolder, task: Task, *, from_parent: bool, stack: contextlib.ExitStack
) -> None:
    """Check, create and lock the run folder. Called on process 0: the others write only their shards of checkpoints.

    `from_parent`: whether the run reads its parent's weights in this session. `stack` holds the lock.
    """
    old = check_resumable(cfg, folder, task.fingerprint)
    is_import = stored_weights.is_weights_only(folder.path)
    if from_parent:
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
    task.save_vocabulary(folder.path)
    # An import's config may predate some settings, and would be read differently once there are checkpoints.
    if is_import or old is None or old != cfg:
        codec.save(cfg, folder.config)
    write_json(folder.path / "environment.json", environment.describe())


def write_json(path: Path, values: dict[str, Any]) -> None:
    atomic_write(path, (json.dumps(values, indent=2) + "\n").encode(), sync=True)


def make_initial_state(context: TrainContext) -> InitialState:
    """Return the state from which this session continues. All processes must call it together."""
    cfg, path = context.cfg, context.folder.path
    parts = (context.family, cfg, context.optimizer, context.mesh)
    if stored_weights.is_weights_only(path):
        if stored_trainer.has_trainer(path) and not cfg.lora.rank:
            state, step = stored_trainer.resume_trainer(path, *parts)
            context.save(step, state, wait=True)  # an evaluation at this step marks its checkpoint
            return InitialState(state=state, step=step, origin="an imported trainer checkpoint")
        state = parents.init_from_weights(*parts, path)
        return _save_step_0(context, state, "imported weights")
    if not multihost.broadcast_from_process0(lambda: not context.checkpoints.steps()):
        return _restore(context)
    if cfg.parent is not None:
        return _save_step_0(context, parents.init_from_parent(*parts), _describe_parent(cfg))
    return InitialState(state=fresh_state(*parts), step=0, origin=f"random weights (seed {cfg.seed})")


def _describe_parent(cfg: RunConfig) -> str:
    parent = cfg.parent
    return "imported weights" if parent is None else f"{parent.path} (step {parent.step}, {parent.fingerprint[:12]})"


def _save_step_0(context: TrainContext, state: TrainState, origin: str) -> InitialState:
    """Save step 0 if it was made from files outside the run, so that the run no longer depends on them."""
    if state.base is not None:
        base_weights.store(context.folder.path, state.base)
    if context.cfg.parent is not None or state.base is not None:
        context.save(0, state, wait=True)
    return InitialState(state=state, step=0, origin=origin)


def _restore(context: TrainContext) -> InitialState:
    """Restore the latest checkpoint. Raises if the data is not the data of the run."""
    cfg, path, fingerprint = context.cfg, context.folder.path, context.task.fingerprint
    target = abstract_state(context.family, cfg, context.optimizer, context.mesh)
    restored = base_weights.restore(path, context.checkpoints, target, set_aside=True)
    recorded = restored.extra.get("data")
    if recorded is not None and recorded != fingerprint:
        raise UserError(
            f"the data at {cfg.data.source!r} is not what this run was trained on (fingerprint {fingerprint[:12]}, the run has "
            f"{recorded[:12]}), so it cannot be continued exactly. Fix: restore the data, or name an unchanged copy of it with "
            f"--data.source; to train on it as it is now, `linnet train --from {path} --data.source {cfg.data.source} --out ANOTHER`."
        )
    return InitialState(
        state=restored.state,
        step=restored.step,
        origin=_describe_parent(cfg),
        eval_pending=bool(restored.extra.get("evaluate")),
    )
