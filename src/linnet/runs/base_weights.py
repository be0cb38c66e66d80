"""The frozen base weights of a run with adapters, stored once in the run folder so that the run needs no other files.

They are an ordinary checkpoint (checksums, any mesh) in RUN/base. The run's own checkpoints then hold only adapters, codebooks and
optimizer state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.core.pytree import replace
from linnet.runs.checkpoint import reader
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.checkpoint.reader import Restored
from linnet.runs.state import TrainState

FOLDER, STEP = "base", 0


def _stored(run: Path) -> Checkpoints:
    return Checkpoints(run / FOLDER, keep=1)


def store(run: Path, base: Any) -> None:
    """Save the base weights. An existing copy is kept: it is identical, or the resume check would have failed."""
    with _stored(run) as stored:
        stored.save(STEP, base, extra={}, wait=True)


def checksums(run: Path) -> dict[str, Any]:
    return reader.checksums(_stored(run).path(STEP))


def without_base(state: TrainState) -> TrainState:
    """The part of the state that is saved in a checkpoint."""
    return replace(state, base=None)


def restore(run: Path, checkpoints: Checkpoints, target: TrainState, step: Any = "latest", **how: Any) -> Restored:
    """Restore a checkpoint and, with adapters, their base weights."""
    restored = checkpoints.restore(without_base(target), step, **how)
    if target.base is None:
        return restored
    base = _stored(run).restore(target.base, STEP).state
    return Restored(state=replace(restored.state, base=base), step=restored.step, extra=restored.extra)
