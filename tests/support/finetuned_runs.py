"""Parents of toy size, and fine-tuned runs of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import tiny

from linnet.config.schema import RunConfig
from linnet.models import registry
from linnet.optim.lora import trainable_specs
from linnet.optim.optimizer import optimizer
from linnet.parallel import sharding
from linnet.runs.load import write_run
from linnet.runs.state import TrainState, fresh_state
from linnet.train import parent as parents
from linnet.train.finetune_config import tuned_config
from linnet.train.parent import find_origin

SHORT = {"optim.steps": 6, "optim.warmup_steps": 2, "train.eval_every": 3, "train.checkpoint_every": 3}
Name = Literal["vq", "moe"]


def parent_run(folder: Path, source: Path, family: Name = "vq", /, **changes: Any) -> Path:
    """A run that looks trained: random weights, saved as step 0. Nothing is compiled but its initial values."""
    cfg = tiny.config(source, family, **changes)
    made = registry.get(family)
    state = fresh_state(made, cfg, optimizer(cfg.optim, made.param_specs(cfg.model)))
    buffers = jax.tree.map(lambda x: 1.5 * x, state.buffers)  # not those that a fresh run has
    write_run(folder / "parent", cfg, state.params, buffers)
    return folder / "parent"


def other_text(folder: Path) -> Path:
    path = folder / "other.txt"
    path.write_text("what another author writes, in words of their own; " * 90)
    return path


def tuned(path: Path, source: Path, keep_optimizer: bool = False, /, **changes: Any) -> RunConfig:
    """As the command makes it, then with `changes` keyed by dotted names."""
    origin = find_origin(path)
    cfg = tuned_config(origin.cfg, origin.parent(keep_optimizer), lora="lora.rank" in changes, other_data=True)
    for name, value in {"data.source": str(source), **SHORT, **changes}.items():
        part, _, field = name.partition(".")
        cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(getattr(cfg, part), **{field: value})})
    return cfg


def begun(cfg: RunConfig) -> TrainState:
    family = registry.get(cfg.family)
    return parents.init_from_parent(
        family, cfg, optimizer(cfg.optim, trainable_specs(family, cfg)), sharding.make_mesh()
    )
