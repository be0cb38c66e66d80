"""DALLE2-pytorch files written while a prior trains: the latest and the best, as weights or as a trainer checkpoint.

They correspond to the local savers of the reference's tracker (`tracker.save`). Resuming a run does not need them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from linnet.config.schema import RunConfig
from linnet.convert.dalle2.export import check_optimizer, model_file, trainer_file
from linnet.convert.torch_writer import write_torch
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.state import TrainState, model_weights
from linnet.runs.stored_trainer import TrainerProgress, has_trainer, trainer_progress

FORM = re.compile(r"(latest|best):(checkpoint|model):(.+)", re.DOTALL)
FIELDS = ("epoch", "samples_seen")
"""Placeholders allowed in a path, in braces as in the reference."""
TRAINER_FORMAT = "dalle2-trainer"
NO_LOSS = 1e9
"""The reference's best validation loss before the first validation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    when: Literal["latest", "best"]
    content: Literal["checkpoint", "model"]
    path: str


def read_exports(cfg: RunConfig) -> list[Export]:
    """Parse `train.exports`, and check that this run can be exported in each of the formats."""
    found = [_parse(text) for text in cfg.train.exports]
    if found and TRAINER_FORMAT not in cfg.model.EXPORT_FORMATS:
        raise invalid("train.exports", cfg.train.exports, f"empty for a {cfg.family} model", "leave it out")
    if found and jax.process_count() > 1:
        raise invalid("train.exports", cfg.train.exports, "empty with several processes", "export after training")
    for export in found:
        if export.content == "checkpoint":
            check_optimizer(cfg.optim)
        if Path(_filled(export.path, dict.fromkeys(FIELDS, 0))).is_dir():
            raise invalid("train.exports", export.path, "a file (this is a folder)", "name a .pth file in it")
    return found


def _parse(text: str) -> Export:
    parts = FORM.fullmatch(text)
    if parts is None:
        needs = "of the form latest:checkpoint:PATH (or best, or model)"
        raise invalid("train.exports", text, needs, "use latest:checkpoint:latest.pth")
    when, content, path = parts.groups()
    check_local("train.exports", path)
    odd = set(re.findall(r"\{([^}]*)\}", path)) - set(FIELDS)
    if odd:
        raise invalid("train.exports", path, f"a path that names only {' and '.join(FIELDS)} in braces", "correct it")
    return Export(when=when, content=content, path=path)  # pyright: ignore[reportArgumentType]


class Exports:
    """Writes a run's exports. As in the reference, a file that cannot be written is reported and does not stop the run."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, report: Callable[[int, str], None]) -> None:
        self.cfg, self.folder, self.report = cfg, folder, report
        self.exports = read_exports(cfg)

    def write(self, when: Literal["latest", "best"], state: TrainState, step: int) -> None:
        for export in self.exports:
            if export.when == when:
                try:
                    self._write_one(export, state, step)
                except UserError as error:
                    self.report(step, str(error))

    def _write_one(self, export: Export, state: TrainState, step: int) -> None:
        progress = progress_at(step, self.cfg, self.folder.path)
        if export.content == "checkpoint":
            content = trainer_content(state, self.cfg, self.folder.path)
        else:
            content = model_file(model_weights(state)[0], self.cfg.prior)
        write_torch(Path(_filled(export.path, progress)), content)


def _filled(path: str, values: dict[str, int]) -> str:
    for name, value in values.items():
        path = path.replace(f"{{{name}}}", str(value))
    return path


def progress_at(step: int, cfg: RunConfig, run: Path) -> dict[str, int]:
    """Return samples seen and epochs as the reference counts them. Counts of an imported trainer are continued."""
    try:
        n_pairs = json.loads((run / "data.json").read_text())["splits"]["train"]["pairs"]
    except (OSError, ValueError, KeyError, TypeError):
        n_pairs = 0
    before = _imported(run)
    added = (step - before.step) * cfg.data.batch_size
    seen = step * cfg.data.batch_size if before.samples_seen is None else before.samples_seen + added
    epoch, of_epochs = (0, seen) if before.epoch is None else (before.epoch, added)
    return {"epoch": epoch + (of_epochs // n_pairs if n_pairs else 0), "samples_seen": seen}


def trainer_content(state: TrainState, cfg: RunConfig, run: Path) -> dict[str, Any]:
    """Content of a complete trainer checkpoint in the reference's format."""
    own = Checkpoints(RunFolder(run).checkpoints, keep=cfg.train.keep).best_loss()
    known = [loss for loss in (own, _imported(run).best_validation_loss) if loss is not None]
    progress = progress_at(int(state.step), cfg, run)
    return trainer_file(state, cfg, best_validation_loss=min(known, default=NO_LOSS), **progress)


def _imported(run: Path) -> TrainerProgress:
    return trainer_progress(run) if has_trainer(run) else TrainerProgress()
