"""Loading of trained runs for evaluation, sampling, serving and export."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.core.pytree import replace
from linnet.data.sources.locations import with_base
from linnet.models import registry
from linnet.models.base import ModelFamily, TokenFamily
from linnet.models.tensor_parallel import check_serving, put_weights
from linnet.optim.lora import merged_config, trainable_specs
from linnet.optim.optimizer import optimizer
from linnet.parallel import sharding
from linnet.parallel.mesh import n_devices, parse_mesh
from linnet.runs import base_weights, weights_file
from linnet.runs import weights as stored_weights
from linnet.runs.checkpoint.manager import Checkpoints
from linnet.runs.folder import RunFolder
from linnet.runs.state import (
    TrainState,
    abstract_state,
    fresh_buffers,
    model_weights,
    served_weights,
    state_from_params,
)
from linnet.runs.vocabulary import Vocabulary, read_vocabulary
from linnet.tokenizers.base import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedRun:
    cfg: RunConfig
    family: ModelFamily
    params: Any
    """The EMA weights if the run keeps them, else the trained weights."""
    buffers: Any
    step: int
    folder: Path
    """The run's folder, or the file written by `linnet export`."""
    tokenizer: Tokenizer | None = None
    """Used instead of the folder's own. An exported file has none."""

    @property
    def lm(self) -> TokenFamily:
        """The run's family as a `TokenFamily`; raises for families that are not language models."""
        return registry.tokens(self.cfg.family)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The run's vocabulary. Read lazily, because exporting weights does not need it."""
        if self.tokenizer is not None:
            return Vocabulary(tokenizer=self.tokenizer, shape=None)
        return read_vocabulary(self.folder, self.cfg.lm.n_vocab)


def decoding_mesh(path: Path, text: str) -> Mesh | None:
    """Return the mesh for `--mesh`, or None for one device. Raises if the run cannot be sampled or served on it."""
    sizes = parse_mesh(text)
    if n_devices(sizes) == 1:
        return None
    cfg = read_config(path)
    if registry.get(cfg.family).decoder is None:
        raise invalid("--mesh", text, f"left out: a {cfg.family} is small enough for one device", "leave it out")
    check_serving(sizes, "--mesh", text)
    cfg.model.check_mesh(sizes)
    if jax.process_count() > 1:
        needs = "the devices of one process: a served model is not sharded over several processes"
        raise invalid("--mesh", text, needs, "start this command without `linnet launch`; --replicas serves more")
    return sharding.open_mesh(text)


def open_run(path: Path, which: str = "best", weights: WeightDtype = "float32", mesh: Mesh | None = None) -> LoadedRun:
    """Load the weights of a checkpoint in the dtype `weights`.

    `which`: `best` by validation loss (the latest if none was evaluated), `latest`, or a step. On a mesh, each device reads and holds
    only its shards. The path may also be a file written by `linnet export`.
    """
    if path.is_file():
        return _open_export(path, which, weights, mesh)
    if stored_weights.is_weights_only(path):
        return _open_weights(path, which, weights, mesh)
    cfg, state, step = open_state(path, which, mesh, part=served_weights)
    params, buffers = model_weights(state)
    family = registry.get(cfg.family)
    specs = family.param_specs(cfg.model)
    params = quant.cast_params(params, specs, weights)
    return LoadedRun(
        cfg=merged_config(cfg),
        family=family,
        params=params if mesh is None else put_weights(specs, params, mesh, family.rules),
        buffers=buffers,
        step=step,
        folder=path,
    )


def _open_weights(path: Path, which: str, weights: WeightDtype, mesh: Mesh | None) -> LoadedRun:
    """Load an imported run that was never trained."""
    if which not in ("best", "latest", "0"):
        raise invalid("--checkpoint", which, "best, latest or 0 (this run is imported weights)", "use latest")
    cfg = codec.load(RunFolder(path).config)
    family = registry.get(cfg.family)
    specs, buffers = family.param_specs(cfg.model), fresh_buffers(family, cfg)
    if mesh is None:
        params = stored_weights.read_weights(path, specs, weights)
    else:
        # Leaf by leaf, so that no device ever holds the complete model.
        params = stored_weights.read_weights(
            path, specs, weights, lambda spec, leaf: put_weights(spec, leaf, mesh, family.rules)
        )
        buffers = put_weights(family.buffer_specs(cfg.model), buffers, mesh, family.rules)
    return LoadedRun(cfg=cfg, family=family, params=params, buffers=buffers, step=0, folder=path)


def _open_export(path: Path, which: str, weights: WeightDtype, mesh: Mesh | None) -> LoadedRun:
    """Load a safetensors file written by `linnet export`."""
    if which not in ("best", "latest", "0"):
        raise invalid("--checkpoint", which, "best, latest or 0 (this is a file of exported weights)", "use latest")
    params, buffers, values = weights_file.import_safetensors(path)
    cfg = merged_config(codec.exported_from_dict({name: value for name, value in values.items() if name != "version"}))
    family = registry.get(cfg.family)
    specs = family.param_specs(cfg.model)
    params = quant.cast_params(params, specs, weights)
    if mesh is not None:
        params = put_weights(specs, params, mesh, family.rules)
        buffers = put_weights(family.buffer_specs(cfg.model), buffers, mesh, family.rules)
    return LoadedRun(cfg=cfg, family=family, params=params, buffers=buffers, step=0, folder=path)


def read_config(path: Path) -> RunConfig:
    """Return the config of a run, an import or an exported file, without its weights."""
    check_local("run", path)
    if path.is_file() and path.suffix != ".safetensors":
        raise UserError(
            f"{path} is neither a run nor a .safetensors file of `linnet export`. Fix: import it first, `linnet import KIND {path} "
            "--out RUN`."
        )
    if path.is_file():
        return weights_file.read_header(path)[0]
    return codec.load(RunFolder(path).config)


def open_state(
    path: Path,
    which: str,
    mesh: Mesh | None = None,
    *,
    part: Callable[[TrainState], TrainState] | None = None,
) -> tuple[RunConfig, TrainState, int]:
    """Load the state of a checkpoint, or only the part that `part` selects; the rest is not read."""
    folder = RunFolder(path)
    cfg = codec.load(folder.config)
    family = registry.get(cfg.family)
    target = abstract_state(family, cfg, optimizer(cfg.optim, trainable_specs(family, cfg)), mesh)
    with Checkpoints(folder.checkpoints, keep=cfg.train.keep) as checkpoints:
        wanted = target if part is None else part(target)
        restored = base_weights.restore(
            path, checkpoints, wanted, _parse_step(checkpoints, which), partial=part is not None
        )
    return cfg, restored.state, restored.step


def checkpoint_step(path: Path, which: str) -> int:
    """Return the step of the checkpoint that `which` (best, latest or a step) names."""
    folder = RunFolder(path)
    with Checkpoints(folder.checkpoints, keep=1) as checkpoints:
        return checkpoints.resolve_step(_parse_step(checkpoints, which))


def _parse_step(checkpoints: Checkpoints, which: str) -> int | Literal["latest", "best"]:
    if which.isdecimal():
        return int(which)
    if which == "best":
        return "latest" if checkpoints.best() is None else "best"
    if which == "latest":
        return "latest"
    raise invalid("--checkpoint", which, "best, latest or a step", "use latest")


def write_run(path: Path, cfg: RunConfig, params: Any, buffers: Any, *, step: int = 0, opt_state: Any = None) -> None:
    """Write a run with the given weights, so that an imported model can be evaluated, sampled and trained like any other run.

    With an optimizer state and its step, training continues from there.
    """
    family = registry.get(cfg.family)
    state = state_from_params(family, cfg, optimizer(cfg.optim, family.param_specs(cfg.model)), params, buffers)
    if opt_state is not None:
        state = replace(state, step=jnp.asarray(step, jnp.int32), opt_state=opt_state)
    folder = RunFolder(path).create()
    with folder.lock(), Checkpoints(folder.checkpoints, keep=cfg.train.keep) as checkpoints:
        checkpoints.save(step, state, extra={}, wait=True)
        codec.save(with_base(cfg), folder.config)  # written last: a folder without a config is not a run
