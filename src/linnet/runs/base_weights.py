"""The frozen weights that a run's adapters belong to: stored once in the run's folder, so that it is complete by itself.

They are a checkpoint like any other (checksums, any mesh), in RUN/base. Checkpoints then hold adapters, codebooks and optimizer state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.core.pytree import replace
from linnet.runs.checkpoint import reader as snapshot
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.checkpoint.reader import Restored
from linnet.runs.state import TrainState

FOLDER, STEP = "base", 0


def _stored(run: Path) -> Checkpoints:
    return Checkpoints(run / FOLDER, keep=1)


def store(run: Path, base: Any) -> None:
    """What is there already stays: it is the same, or the run would have been refused."""
    with _stored(run) as stored:
        stored.save(STEP, base, extra={}, wait=True)


def checksums(run: Path) -> dict[str, Any]:
    return snapshot.checksums(_stored(run).path(STEP))


def without_base(state: TrainState) -> TrainState:
    """What a checkpoint holds."""
    return replace(state, base=None)


def restore(run: Path, checkpoints: Checkpoints, target: TrainState, step: Any = "latest", **how: Any) -> Restored:
    """A checkpoint and, with adapters, the base that they belong to."""
    restored = checkpoints.restore(without_base(target), step, **how)
    if target.base is None:
        return restored
    base = _stored(run).restore(target.base, STEP).state
    return Restored(state=replace(restored.state, base=base), step=restored.step, extra=restored.extra)
