"""Trainer state beside imported weights: `trainer/state.safetensors` holds online weights, their average and Adam's moments.

`linnet train` starts from it at its step. As long as the run has no checkpoint of its own, data and settings may still be chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from linnet import sharding
from linnet.config import RunConfig
from linnet.errors import UserError, refuse
from linnet.families.family import Family
from linnet.params import Spec, is_spec
from linnet.pytree import leaf_name, named_leaves, replace
from linnet.train.interchange.stored_array import Leaf, StoredArray, read_safetensors, write_safetensors
from linnet.train.state import TrainState, begin_from

FOLDER, FILE = "trainer", "state.safetensors"
FORMAT = "linnet-trainer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTrainer:
    step: int
    optimizer_step: int
    params: Any
    ema: Any
    """None where no average was kept."""
    mean: Any
    square: Any


def has_trainer(run: Path) -> bool:
    return (run / FOLDER / FILE).is_file()


def write_trainer(run: Path, trainer: StoredTrainer) -> None:
    trees = {name: getattr(trainer, name) for name in ("params", "ema", "mean", "square")}
    leaves = [_leaf(name, np.asarray(value)) for name, value in named_leaves(trees)]
    metadata = {"format": FORMAT, "step": str(trainer.step), "optimizer_step": str(trainer.optimizer_step)}
    (run / FOLDER).mkdir()
    write_safetensors(run / FOLDER / FILE, leaves, metadata)


def _leaf(name: str, value: np.ndarray) -> Leaf:
    return Leaf(name=name, shape=value.shape, dtype=value.dtype, parts=lambda: iter([value]))


def stored_step(run: Path) -> int:
    """The update that training continues from."""
    return _read(run)[1][0]


def check_trainer(run: Path, cfg: RunConfig) -> None:
    """Refuses settings that the stored state does not fit, before anything is written."""
    step = stored_step(run)
    if cfg.optim.name != "adamw":
        needs = f"adamw: {run} continues with Adam's moments from step {step}"
        raise refuse("optim.name", cfg.optim.name, needs, "use adamw, or import again with --optimizer fresh")
    if cfg.optim.total_steps <= step:
        needs = f"more than the {step:,} updates that the checkpoint has already had"
        raise refuse("optim.steps", cfg.optim.total_steps, needs, f"use --optim.steps {step + cfg.optim.total_steps}")


def continue_from(
    run: Path, family: Family, cfg: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, int]:
    arrays, (step, optimizer_step) = _read(run)
    specs, rules = family.param_specs(cfg.model), family.RULES

    def tree(prefix: str) -> Any:
        def one(path: tuple[Any, ...], spec: Spec) -> jax.Array:
            found = arrays.get(f"{prefix}/{leaf_name(path)}")
            if found is None or found.shape != spec.shape:
                raise UserError(f"{run / FOLDER / FILE} does not fit the model. Fix: import it again.")
            return sharding.put(found.read().astype(spec.dtype), spec.axes, mesh, rules)

        return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)

    state = begin_from(family, cfg, optimizer, tree("params"), mesh)
    opt_state = _with_moments(state.opt_state, tree("mean"), tree("square"), optimizer_step)
    average = state.ema
    if average is not None and any(name.startswith("ema/") for name in arrays):
        average = tree("ema")
    count = jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding)
    return replace(state, step=count, opt_state=opt_state, ema=average), step


def _with_moments(opt_state: Any, mean: Any, square: Any, step: int) -> Any:
    """Adam's moments and count in place of fresh ones; the schedule counts the optimizer's updates too."""

    def counted(old: Any) -> jax.Array:
        return jax.device_put(jnp.asarray(step, old.dtype), old.sharding)

    def one(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return part._replace(count=counted(part.count), mu=mean, nu=square)
        return part._replace(count=counted(part.count)) if isinstance(part, optax.ScaleByScheduleState) else part

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    is_part: Callable[[Any], bool] = lambda part: isinstance(part, kinds)  # noqa: E731
    return jax.tree.map(one, opt_state, is_leaf=is_part)


def _read(run: Path) -> tuple[dict[str, StoredArray], tuple[int, int]]:
    path = run / FOLDER / FILE
    arrays, metadata = read_safetensors(path)
    counts = [metadata.get(name, "") for name in ("step", "optimizer_step")]
    if metadata.get("format") != FORMAT or not all(count.isdecimal() and len(count) < 16 for count in counts):
        raise UserError(f"{path} is not a stored trainer state. Fix: import it again.")
    return arrays, (int(counts[0]), int(counts[1]))
