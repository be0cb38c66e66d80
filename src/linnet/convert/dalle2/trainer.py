"""Read the trainer state of a DALLE2-pytorch checkpoint (Adam's moments, counts and settings), so that training can be resumed.

torch stores the optimizer's state by number. The numbers count the parameters of each group in the order of the state dict. The
first group has the parameters with two or more axes (decayed), the second all others; there is a single group if all decay, or
none. The rotary frequencies, shared by all layers, are not a weight here; later releases of the rotary library count them as a
parameter that is never trained.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.config.schema import OptimConfig
from linnet.convert.dalle2.prior import NETWORK, ImportedPrior, parse_number
from linnet.convert.torch_pickle import Inert
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import ROTARY, from_reference
from linnet.models.prior.params import PriorParams
from linnet.runs.stored_trainer import StoredTrainer, TrainerProgress, write_trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
UNORDERED_BEFORE = (0, 10)
"""Earlier releases ordered the parameters of a group by a Python set, and no file records that order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    lr: float
    decay: float
    decay_vectors: bool
    """Whether every parameter decays: the trainer was made with `group_wd_params=False` and has one parameter group."""
    b1: float
    b2: float
    eps: float
    warmup_steps: int | None
    cosine_steps: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerState:
    step: int
    """Updates of the trainer, which the moving average and the schedule follow."""
    optimizer_step: int
    mean: PriorParams
    """Adam's first moment."""
    square: PriorParams
    """Adam's second moment."""
    settings: AdamSettings


class UnusableTrainerState(UserError):
    """The file has no trainer state, or it cannot be mapped. The message gives the reason."""


def read_trainer_state(loaded: Mapping[str, Any], cfg: PriorConfig, version: str | None, path: Path) -> TrainerState:
    """Extract the trainer state from the content of a checkpoint, as returned by `read_torch`."""
    saved, model = loaded.get("optimizer"), loaded.get("model")
    if not isinstance(saved, dict) or not isinstance(model, dict) or not saved.get("param_groups"):
        raise _unusable("the file has no optimizer state")
    groups = _check_groups(saved)
    if len(groups) == 2 and _parse_release(version) < UNORDERED_BEFORE:
        raise _unusable("releases before 0.10.0 did not record the order of their parameters")
    names = _parameter_names(model, groups)
    mean, square, counts = _read_moments(saved.get("state"), names, model, path.stat().st_size)
    step = parse_number(_entry(loaded, "step"))
    if not isinstance(step, int) or step < 1 or len(counts) != 1:
        raise _unusable("its parameters were not all updated equally often" if counts else "nothing was trained yet")
    average = loaded.get("ema")
    if isinstance(average, dict) and parse_number(average.get("step")) not in (None, step):
        raise _unusable("its EMA has another step count than its trainer")
    return TrainerState(
        step=step,
        optimizer_step=counts.pop(),
        mean=from_reference(mean, cfg),
        square=from_reference(square, cfg),
        settings=_read_settings(groups, loaded),
    )


def train_settings(trainer: TrainerState) -> dict[str, Any]:
    """Return the training settings stored in the file, as fields of the reference's `train`."""
    of = trainer.settings
    return {"lr": of.lr, "wd": of.decay, "warmup_steps": of.warmup_steps, "cosine_decay_max_steps": of.cosine_steps}


def with_adam(optim: OptimConfig, trainer: TrainerState) -> OptimConfig:
    """Set Adam's constants and whether vectors decay, which the reference's JSON does not contain."""
    names = ("b1", "b2", "eps", "decay_vectors")
    return dataclasses.replace(optim, **{name: getattr(trainer.settings, name) for name in names})


def store_trainer(run: Path, found: ImportedPrior, trainer: TrainerState) -> None:
    """Store the trainer state beside the weights of an imported run, so that `linnet train` resumes from it."""
    weights = {found.which: found.params, ("online" if found.which == "ema" else "ema"): found.other}
    stored = StoredTrainer(
        progress=_read_progress(found.facts, trainer.step),
        optimizer_step=trainer.optimizer_step,
        params=weights["online"],
        ema=weights["ema"],
        mean=trainer.mean,
        square=trainer.square,
    )
    write_trainer(run, stored)


def _read_progress(facts: Mapping[str, Any], step: int) -> TrainerProgress:
    """Return epochs, samples and the best loss of the file, if plausible."""
    seen, epoch = (
        value if type(value := facts.get(name)) is int and value >= 0 else None for name in ("samples_seen", "epoch")
    )
    best = facts.get("best_validation_loss")
    best = float(best) if best is not None and math.isfinite(best) else None
    return TrainerProgress(step=step, samples_seen=seen, epoch=epoch, best_validation_loss=best)


def _unusable(why: str) -> UnusableTrainerState:
    return UnusableTrainerState(f"its optimizer state cannot be used: {why}. Fix: use --optimizer fresh.")


def _entry(values: Mapping[str, Any], name: str) -> Any:
    found = values.get(name)
    if isinstance(found, np.ndarray) and found.size == 1:
        return found.reshape(-1)[0].item()
    return found


def _parse_release(version: str | None) -> tuple[int, ...]:
    """Parse a version; without one it is a release before 0.6.2."""
    return tuple(map(int, re.findall(r"\d{1,6}", version or "")))[:2]


def _check_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = saved["param_groups"]
    if not isinstance(groups, list) or len(groups) > 2 or not all(isinstance(group, dict) for group in groups):
        raise _unusable("its groups of parameters are not those of the reference")
    for group in groups:
        members = group.get("params")
        if not isinstance(members, list) or not all(type(n) is int for n in members):
            raise _unusable("its groups of parameters are not those of the reference")
        if group.get("amsgrad") or group.get("maximize"):
            raise _unusable("it is a variant of Adam that Linnet does not have (amsgrad or maximize)")
    return groups


def _parameter_names(model: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[int, str]:
    """Return the name of each numbered parameter, without the rotary frequencies."""
    for name, value in model.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise _unusable("its model is not a state dict")
    if any(name.startswith("clip.") for name in model):
        raise _unusable("it was saved together with CLIP")
    trained = [name for name in model if name.startswith(NETWORK) and not name.endswith(".beta")]
    rotary = [name for name in trained if name.endswith(ROTARY)]
    trained = [name for name in trained if name not in rotary[1:]]  # one module, shared by all layers
    n_saved = sum(len(group["params"]) for group in groups)
    if n_saved == len(trained) - len(rotary[:1]):  # then it is a buffer
        trained = [name for name in trained if name not in rotary]
    if len(groups) == 1:
        ordered = [trained]
    else:
        ordered = [[n for n in trained if model[n].ndim >= 2], [n for n in trained if model[n].ndim < 2]]
    if [len(part) for part in ordered] != [len(group["params"]) for group in groups]:
        raise _unusable("it has another number of parameters than the model")
    pairs = [
        (n, name)
        for group, part in zip(groups, ordered, strict=True)
        for n, name in zip(group["params"], part, strict=True)
    ]
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _unusable("a parameter is in two groups")
    return {n: name for n, name in found.items() if name not in rotary}


def _read_moments(
    state: Any, names: Mapping[int, str], model: Mapping[str, Any], size: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], set[int]]:
    """Return first and second moments by network name, and the update counts. A parameter that never had a gradient has none."""
    if not isinstance(state, dict):
        raise _unusable("the file has no optimizer state")
    found: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
    counts: set[int] = set()
    total = 0
    for n, name in names.items():
        entry, shape = state.get(n), model[name].shape
        short = name.removeprefix(NETWORK)
        if entry is None:
            for values in found:
                values[short] = np.zeros(shape, np.float32)
            continue
        arrays = [entry.get(moment) if isinstance(entry, dict) else None for moment in MOMENTS]
        count = parse_number(entry.get("step")) if isinstance(entry, dict) else None
        if count is None or count != int(count) or count < 1:
            raise _unusable("a parameter's count of updates is missing")
        for values, array in zip(found, arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.shape != shape:
                raise _unusable("a moment does not have the shape of its parameter")
            total += array.nbytes
            if total > size or not np.all(np.isfinite(array.astype(np.float32))):
                raise _unusable("its moments are damaged")
            values[short] = array
        counts.add(int(count))
    if any(np.any(array < 0) for array in found[1].values()):
        raise _unusable("its moments are damaged")
    return *found, counts


def _read_settings(groups: list[dict[str, Any]], loaded: Mapping[str, Any]) -> AdamSettings:
    first = groups[0]
    betas = first.get("betas")
    values = [
        parse_number(value)
        for value in (
            first.get("initial_lr", first.get("lr")),
            first.get("weight_decay", 0.0),
            *(betas if isinstance(betas, tuple | list) and len(betas) == 2 else (None, None)),
            first.get("eps"),
        )
    ]
    if any(value is None or value < 0 for value in values):
        raise _unusable("its settings are missing")
    lr, decay, b1, b2, eps = (float(value) for value in values if value is not None)
    schedule = loaded.get("scheduler")
    wave = schedule.get("T_max") if isinstance(schedule, dict) else None
    return AdamSettings(
        lr=lr,
        decay=decay,
        decay_vectors=len(groups) == 1 and decay > 0,
        b1=b1,
        b2=b2,
        eps=eps,
        warmup_steps=_read_warmup(loaded.get("warmup_scheduler")),
        cosine_steps=wave if type(wave) is int and 0 < wave < 10**9 else None,
    )


def _read_warmup(schedule: Any) -> int | None:
    state = schedule.state if isinstance(schedule, Inert) and isinstance(schedule.state, dict) else {}
    parts = state.get("warmup_params")
    period = parts[0].get("warmup_period") if isinstance(parts, list) and parts and isinstance(parts[0], dict) else None
    return period if type(period) is int and 0 < period < 10**9 else None
