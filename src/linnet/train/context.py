"""What the parts of a training session share: settings, folder, mesh, task, checkpoints and the stop request."""

from __future__ import annotations

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from linnet.config.schema import RunConfig
from linnet.models.base import ModelFamily
from linnet.parallel import multihost
from linnet.runs import base_weights
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.state import TrainState
from linnet.train.interrupt import Interrupt
from linnet.train.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainContext:
    cfg: RunConfig
    folder: RunFolder
    mesh: Mesh
    family: ModelFamily
    optimizer: optax.GradientTransformation
    task: Task
    checkpoints: Checkpoints
    interrupt: Interrupt

    def save(self, step: int, state: TrainState, *, wait: bool = False, evaluate: bool = False) -> None:
        """Save a checkpoint. `evaluate`: an evaluation follows, which a resume repeats if it was interrupted."""
        extra = {"data": self.task.fingerprint, "evaluate": evaluate}
        self.checkpoints.save(step, base_weights.without_base(state), extra=extra, wait=wait)

    def allow_exit_after_last(self, step: int) -> None:
        """After the last checkpoint, let a signal end a single process at once; a resume then repeats the evaluation.

        Several processes must agree first, which they do between two batches of the evaluation.
        """
        if step >= self.cfg.optim.total_steps and jax.process_count() == 1:
            self.interrupt.allow_exit()

    def is_any_interrupted(self) -> bool:
        """Whether any process was asked to stop. All processes must call it together."""
        return any(multihost.all_gather_json(self.interrupt.requested))
