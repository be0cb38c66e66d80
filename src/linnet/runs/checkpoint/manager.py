"""The checkpoint manager: asynchronous saves, retention of the latest and the best, and fallback from damaged checkpoints.

A checkpoint is a folder named by its step (see `reader`). Only the run that holds the lock may save or set aside; readers
change nothing on disk. The processes of a multi-host run call these functions together: process 0 inspects the folder,
decides and deletes, and each process writes and reads its shards of the arrays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write, remove_parts
from linnet.parallel import multihost
from linnet.runs.checkpoint import host_shards, reader, silence
from linnet.runs.checkpoint.reader import CorruptCheckpoint, Restored
from linnet.runs.checkpoint.writer import PeerLost, Writer

log = logging.getLogger("linnet")

BEST = "best.json"
TEMPORARY, DELETED, DAMAGED = ".orbax-checkpoint-tmp", ".deleted-", "damaged-"
HEADROOM = 1.1  # Free space needed for a checkpoint, relative to the bytes of its arrays.


class CheckpointError(UserError):
    """A checkpoint could not be written. Earlier checkpoints are intact."""


class Checkpoints:
    """The checkpoints of one run: the `keep` latest ones, and the best.

    After saving, call `close`, or use `with Checkpoints(...) as checkpoints`: a save in flight is lost if Python exits first.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        if keep < 1:
            raise invalid("checkpoint.keep", keep, "at least 1", "keep 1 or more checkpoints")
        silence.silence_orbax()
        self.folder = folder.absolute()
        self.keep = keep
        self._writer: Writer | None = None
        self._in_flight: tuple[int, int] | None = None  # Step and bytes of the save in progress.

    # Reading.

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The committed step with the lowest validation loss."""
        losses, steps = self._losses(), self.steps()
        return min((step for step in steps if step in losses), key=lambda step: (losses[step], step), default=None)

    def resolve_step(self, step: int | str) -> int:
        """The committed step that a number, "best" or "latest" names."""
        return self._newest({}) if step == "latest" else self._resolve(step)

    def best_loss(self) -> float | None:
        """The validation loss of the best checkpoint."""
        best = self.best()
        return None if best is None else self._losses()[best]

    def restore(
        self,
        target: Any,
        step: int | Literal["latest", "best"] = "latest",
        *,
        set_aside: bool = False,
        partial: bool = False,
    ) -> Restored:
        """Restore the state of `step`, bit-identical, in the structure, dtypes and shardings of `target`.

        `target` is a pytree of `jax.ShapeDtypeStruct`. With `partial` it may lack top-level parts of the state, which are then
        not read. For "latest", a damaged checkpoint is skipped with a warning and the one before it is used. With `set_aside`
        (only for the holder of the run's lock) it is also renamed, so that its step can be saved again.
        """
        self.wait()
        if set_aside:
            self._remove_temporary()
        if step != "latest":
            return self._restore_one(
                target, multihost.broadcast_from_process0(lambda: self.resolve_step(step)), partial
            )
        damaged: dict[int, str] = {}
        while True:
            number = multihost.broadcast_from_process0(lambda: self._newest(damaged))
            try:
                restored = reader.read_checkpoint(self.path(number), target, partial=partial)
                break
            except CorruptCheckpoint as why:
                # If it no longer exists, the training process has pruned it in the meantime.
                if multihost.broadcast_from_process0(lambda: self.path(number).exists()):  # noqa: B023, called at once
                    damaged[number] = str(why)
        # Rename only now: if no checkpoint can be read, the cause may be elsewhere, and nothing must be renamed.
        multihost.broadcast_from_process0(lambda: self._report_damaged(damaged, restored.step, set_aside=set_aside))
        return restored

    # Writing.

    def save(self, step: int, state: Any, *, extra: dict[str, Any], wait: bool = False) -> None:
        """Save `state` (a pytree of arrays, which may include PRNG keys) in the background.

        Returns when the arrays are copied, so the caller may donate them at once. `extra` is a small JSON object. A step that
        is already saved is not changed. The failure of an earlier save is raised here.
        """
        self.wait()
        extra = json.loads(json.dumps(extra))  # Fails here if it is not JSON, and copies it.
        need = math.ceil(HEADROOM * host_shards.nbytes(state))
        try:
            if not multihost.broadcast_from_process0(lambda: self._check_space(step, need)):
                return
            copy = host_shards.copy_to_host(state)
            if self._writer is None:
                self._writer = Writer()
            self._in_flight = (step, need)
            self._writer.write(self.path(step), step, copy, extra)
        except Exception as error:
            raise self._failed(step, need, error) from error
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is committed, then prune old checkpoints. Raises if the save failed."""
        if self._writer is None or self._in_flight is None:
            return
        step, need = self._in_flight
        try:
            self._writer.wait()
        except Exception as error:
            raise self._failed(step, need, error) from error
        self._in_flight = None
        self._prune()

    def mark_best(self, step: int, loss: float) -> None:
        """Record the validation loss of a step whose save is committed or in flight. The step with the lowest loss is kept."""
        in_flight = self._in_flight is not None and self._in_flight[0] == step
        assert in_flight or step in self.steps(), f"step {step} is not saved, so it cannot be marked"
        if math.isfinite(loss):
            self._write_losses(self._losses() | {step: float(loss)})
        if self._in_flight is None:
            self._prune()

    def set_losses(self, losses: Mapping[int, Any], *, last: int) -> None:
        """Add validation losses that are not recorded yet, and drop those of steps after `last`."""
        known = self._losses()
        finite = {step: float(loss) for step, loss in losses.items() if type(loss) in (int, float)}
        wanted = {step: loss for step, loss in (finite | known).items() if step <= last}
        if {step: loss for step, loss in wanted.items() if step in self.steps()} != known:
            self._write_losses(wanted)

    def close(self) -> None:
        """Wait for the save in flight, then stop Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The files.

    def path(self, step: int) -> Path:
        return self.folder / f"{step:09d}"

    def _resolve(self, step: int | str) -> int:
        steps, found = self.steps(), self.best() if step == "best" else step
        if isinstance(found, int) and found in steps:
            return found
        if not steps:
            raise self._nothing_left({})
        what = "the step of an evaluated checkpoint" if step == "best" else "a saved step"
        raise invalid("step", step, f"{what} of {self.folder}", f"use latest, or one of {steps}")

    def _newest(self, damaged: dict[int, str]) -> int:
        left = [step for step in self.steps() if step not in damaged]
        if not left:
            raise self._nothing_left(damaged)
        return left[-1]

    def _report_damaged(self, damaged: dict[int, str], used: int, *, set_aside: bool) -> None:
        for number, why in damaged.items():
            where = f" It is set aside as {self._set_aside(number)}." if set_aside else ""
            log.warning(
                "The checkpoint of step %d is damaged (%s). Step %d is used instead.%s", number, why, used, where
            )

    def _check_space(self, step: int, need: int) -> bool:
        """Return whether to save `step`: False if it is already saved. Raises if the disk has too little space."""
        if step in self.steps():
            return False
        if self._writer is None:
            self._remove_temporary()
            self.folder.mkdir(parents=True, exist_ok=True)
        if _free_bytes(self.folder) < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def _restore_one(self, target: Any, step: int, partial: bool) -> Restored:
        try:
            return reader.read_checkpoint(self.path(step), target, partial=partial)
        except CorruptCheckpoint as why:
            raise UserError(
                f"The checkpoint of step {step} in {self.folder} is damaged ({why}). "
                f"Fix: use latest, or another of the saved steps {[s for s in self.steps() if s != step]}."
            ) from why

    def _nothing_left(self, damaged: dict[int, str]) -> UserError:
        if not damaged:
            return UserError(f"There is no checkpoint in {self.folder}. Fix: train the run first, or name another run.")
        found = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        return UserError(
            f"No checkpoint in {self.folder} can be read ({found}). Fix: restore a copy of the folder, or move "
            f"the damaged checkpoints away and start again."
        )

    def _set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint and drop its loss. Names already taken by the same step are not reused."""
        names = (f"{DAMAGED}{step:09d}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
        name = next(name for name in names if not (self.folder / name).exists())
        self.path(step).rename(self.folder / name)
        self._write_losses({s: loss for s, loss in self._losses().items() if s != step})
        return name

    def _prune(self) -> None:
        """Delete all but the `keep` latest and the best. Each is renamed first, so no reader sees a partial checkpoint."""
        if jax.process_index() != 0:
            return
        retained = {*self.steps()[-self.keep :], self.best()}
        _sync(self.folder)  # The new checkpoints must be on disk before old ones are deleted.
        for step in self.steps():
            if step not in retained:
                deleted = self.folder / f"{DELETED}{self.path(step).name}"
                try:
                    self.path(step).rename(deleted)
                except OSError as error:
                    log.warning("The old checkpoint of step %d cannot be deleted (%s).", step, error)
                shutil.rmtree(deleted, ignore_errors=True)

    def _remove_temporary(self) -> None:
        """Remove temporary files left by a killed process."""
        if not self.folder.is_dir() or jax.process_index() != 0:
            return
        (self.folder / f"{BEST}.tmp").unlink(missing_ok=True)
        remove_parts(self.folder / BEST)
        for entry in self.folder.iterdir():
            if TEMPORARY in entry.name or entry.name.startswith(DELETED):
                shutil.rmtree(entry, ignore_errors=True)

    def _failed(self, step: int, need: int, error: Exception) -> CheckpointError:
        """Remove the partial files of a failed save, and return the error to raise."""
        self._in_flight = None
        if self._writer is not None:  # Its threads may hold further errors, so the next save uses a new one.
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None
        if jax.process_index() == 0:
            shutil.rmtree(self.folder / f"{self.path(step).name}{TEMPORARY}", ignore_errors=True)
        intact = f"Earlier checkpoints are intact: {self.steps() or 'there are none yet'}."
        if isinstance(error, PeerLost):
            return CheckpointError(
                f"The checkpoint of step {step} is not written: {error}. {intact} "
                f"Fix: read the log of that process, then resume."
            )
        if not _is_full(error):
            return CheckpointError(
                f"The checkpoint of step {step} could not be written to {self.folder} ({reader.short(error)}). "
                f"{intact} Fix: make the folder writable, then resume."
            )
        free = _free_bytes(self.folder)
        return CheckpointError(
            f"The disk is too full for the checkpoint of step {step}: {self.folder} has {free / 1e6:.1f} MB free, and "
            f"{need / 1e6:.1f} MB are needed. {intact} Fix: free some space, then resume."
        )

    def _losses(self) -> dict[int, float]:
        try:
            return {int(step): float(loss) for step, loss in json.loads((self.folder / BEST).read_text()).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, OSError) as error:
            log.warning("%s cannot be read (%s): the best checkpoint is not known.", self.folder / BEST, error)
            return {}

    def _write_losses(self, losses: dict[int, float]) -> None:
        """Replace the file atomically, without the losses of deleted checkpoints."""
        if jax.process_index() != 0:
            return
        alive = {*self.steps(), *([self._in_flight[0]] if self._in_flight else [])}
        text = json.dumps({str(step): loss for step, loss in sorted(losses.items()) if step in alive})
        try:
            atomic_write(self.folder / BEST, text.encode(), sync=True)
        except UserError as error:
            raise CheckpointError(
                f"{self.folder / BEST} cannot be written ({error.__cause__}). The checkpoints are intact. "
                f"Fix: free some space or correct the permissions, then resume."
            ) from error


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _sync(folder: Path) -> None:
    """Make renames in `folder` durable across a power failure."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _is_full(error: BaseException | None) -> bool:
    """Whether the disk or a quota is full. TensorStore reports this only in the error message."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(text in str(error) for text in ("No space left on device", "Disk quota exceeded")):
            return True
        error = error.__cause__ or error.__context__
    return False
