"""Imported trainer state: `trainer/state.safetensors` holds online weights, their EMA and Adam's moments.

`linnet train` continues from its step. Until the run has a checkpoint of its own, data and settings can still be chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import leaf_name, named_leaves, replace
from linnet.models.base import ModelFamily
from linnet.parallel import sharding
from linnet.runs.state import TrainState, init_state_from
from linnet.runs.stored_array import Leaf, StoredArray, read_safetensors, write_safetensors

FOLDER, FILE = "trainer", "state.safetensors"
FORMAT = "linnet-trainer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """Counters of an imported trainer at its step. None: not recorded."""

    step: int = 0
    samples_seen: int | None = None
    epoch: int | None = None
    best_validation_loss: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTrainer:
    progress: TrainerProgress
    optimizer_step: int
    params: Any
    ema: Any
    """None if no EMA was kept."""
    mean: Any
    square: Any


def has_trainer(run: Path) -> bool:
    return (run / FOLDER / FILE).is_file()


def write_trainer(run: Path, trainer: StoredTrainer) -> None:
    trees = {name: getattr(trainer, name) for name in ("params", "ema", "mean", "square")}
    leaves = [_leaf(name, np.asarray(value)) for name, value in named_leaves(trees)]
    counts = {name: str(value) for name, value in dataclasses.asdict(trainer.progress).items() if value is not None}
    metadata = {"format": FORMAT, "optimizer_step": str(trainer.optimizer_step), **counts}
    (run / FOLDER).mkdir()
    write_safetensors(run / FOLDER / FILE, leaves, metadata)


def _leaf(name: str, value: np.ndarray) -> Leaf:
    return Leaf(name=name, shape=value.shape, dtype=value.dtype, parts=lambda: iter([value]))


def trainer_progress(run: Path) -> TrainerProgress:
    """Return the counters at the step that training continues from. Imports by earlier versions recorded only the step."""
    metadata = _read(run)[1]
    seen, epoch = (_count(metadata, name) for name in ("samples_seen", "epoch"))
    try:
        best = float(metadata["best_validation_loss"])
    except (KeyError, ValueError):
        best = None
    return TrainerProgress(step=int(metadata["step"]), samples_seen=seen, epoch=epoch, best_validation_loss=best)


def check_trainer(run: Path, cfg: RunConfig) -> None:
    """Raise if the settings do not fit the stored state, before anything is written."""
    step = trainer_progress(run).step
    if cfg.optim.name != "adamw":
        needs = f"adamw: {run} continues with Adam's moments from step {step}"
        raise invalid("optim.name", cfg.optim.name, needs, "use adamw, or import again with --optimizer fresh")
    if cfg.optim.total_steps <= step:
        needs = f"more than the {step:,} updates that the checkpoint has already had"
        raise invalid("optim.steps", cfg.optim.total_steps, needs, f"use --optim.steps {step + cfg.optim.total_steps}")


def resume_trainer(
    run: Path, family: ModelFamily, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, int]:
    """Return the state that training continues from, on the mesh, and its step."""
    arrays, metadata = _read(run)
    step, optimizer_step = int(metadata["step"]), int(metadata["optimizer_step"])
    specs, rules = family.param_specs(cfg.model), family.rules

    def tree(prefix: str) -> Any:
        def one(path: tuple[Any, ...], spec: Spec) -> jax.Array:
            stored = arrays.get(f"{prefix}/{leaf_name(path)}")
            if stored is None or stored.shape != spec.shape:
                raise UserError(f"{run / FOLDER / FILE} does not fit the model. Fix: import it again.")
            return sharding.host_to_global(stored.read().astype(spec.dtype), spec.axes, mesh, rules)

        return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)

    state = init_state_from(family, cfg, optimizer, tree("params"), mesh)
    opt_state = _with_moments(state.opt_state, tree("mean"), tree("square"), optimizer_step)
    ema = state.ema
    if ema is not None and any(name.startswith("ema/") for name in arrays):
        ema = tree("ema")
    count = jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding)
    return replace(state, step=count, opt_state=opt_state, ema=ema), step


def _with_moments(opt_state: Any, mean: Any, square: Any, step: int) -> Any:
    """Insert the stored Adam moments, and set the counts of Adam and of the schedule to the optimizer's step."""

    def with_count(old: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(step, old.dtype), old.sharding)

    def one(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return part._replace(count=with_count(part.count), mu=mean, nu=square)
        return part._replace(count=with_count(part.count)) if isinstance(part, optax.ScaleByScheduleState) else part

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    is_part: Callable[[Any], bool] = lambda part: isinstance(part, kinds)  # noqa: E731
    return jax.tree.map(one, opt_state, is_leaf=is_part)


def _read(run: Path) -> tuple[dict[str, StoredArray], dict[str, str]]:
    path = run / FOLDER / FILE
    arrays, metadata = read_safetensors(path)
    counts = [_count(metadata, name) for name in ("step", "optimizer_step")]
    if metadata.get("format") != FORMAT or None in counts:
        raise UserError(f"{path} is not a stored trainer state. Fix: import it again.")
    return arrays, metadata


def _count(metadata: Mapping[str, str], name: str) -> int | None:
    text = metadata.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else None
