"""Opening a trained run: to evaluate, sample or export it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

from linnet import config as configs
from linnet import quant
from linnet.config import RunConfig
from linnet.errors import refuse
from linnet.families import registry
from linnet.families.family import Family, TokenFamily
from linnet.train.checkpoint import Checkpoints
from linnet.train.folder import RunFolder
from linnet.train.interchange import stored_weights
from linnet.train.optim import optimizer
from linnet.train.state import TrainState, abstract_state, fresh_buffers, model_weights, start_from
from linnet.train.vocabulary import Vocabulary, read_vocabulary
from linnet.weights import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    cfg: RunConfig
    family: Family
    params: Any
    """The moving average where the run keeps one."""
    buffers: Any
    step: int
    folder: Path

    @property
    def writer(self) -> TokenFamily:
        """The family, for what only families of tokens do."""
        return registry.tokens(self.cfg.family)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Read only when asked for: weights can be exported without it."""
        return read_vocabulary(self.folder, self.cfg.writer.n_vocab)


def open_run(path: Path, which: str = "best", weights: Weights = "float32") -> Run:
    """The weights of a checkpoint, held in so many bits: `best` by validation loss (the latest if none was evaluated), `latest`, or
    a step."""
    if stored_weights.is_weights_alone(path):
        return _open_weights(path, which, weights)
    cfg, state, step = open_state(path, which)
    params, buffers = model_weights(state)
    family = registry.get(cfg.family)
    return Run(
        cfg=cfg,
        family=family,
        params=quant.lower(params, family.param_specs(cfg.model), weights),
        buffers=buffers,
        step=step,
        folder=path,
    )


def _open_weights(path: Path, which: str, weights: Weights) -> Run:
    """An imported run that was never trained."""
    if which not in ("best", "latest", "0"):
        raise refuse("--checkpoint", which, "best, latest or 0 (this run is imported weights)", "use latest")
    cfg = configs.load(RunFolder(path).config)
    family = registry.get(cfg.family)
    params = stored_weights.read_weights(path, family.param_specs(cfg.model), weights)
    return Run(cfg=cfg, family=family, params=params, buffers=fresh_buffers(family, cfg), step=0, folder=path)


def open_state(path: Path, which: str) -> tuple[RunConfig, TrainState, int]:
    folder = RunFolder(path)
    cfg = configs.load(folder.config)
    family = registry.get(cfg.family)
    target = abstract_state(family, cfg, optimizer(cfg.optim, family.param_specs(cfg.model)))
    with Checkpoints(folder.checkpoints, keep=cfg.train.keep) as checkpoints:
        restored = checkpoints.restore(target, _chosen(checkpoints, which))
    return cfg, restored.state, restored.step


def _chosen(checkpoints: Checkpoints, which: str) -> int | Literal["latest", "best"]:
    if which.isdecimal():
        return int(which)
    if which == "best":
        return "latest" if checkpoints.best() is None else "best"
    if which == "latest":
        return "latest"
    raise refuse("--checkpoint", which, "best, latest or a step", "use latest")


def write_run(path: Path, cfg: RunConfig, params: Any, buffers: Any) -> None:
    """A run at step 0 with given weights: imported models are evaluated, sampled and trained like any other."""
    family = registry.get(cfg.family)
    state = start_from(family, cfg, optimizer(cfg.optim, family.param_specs(cfg.model)), params, buffers)
    folder = RunFolder(path).create()
    with folder.lock(), Checkpoints(folder.checkpoints, keep=cfg.train.keep) as checkpoints:
        checkpoints.save(0, state, extra={}, wait=True)
        configs.save(cfg, folder.config)  # last: a folder without it is not a run
