"""A prior and a painter of toy size with random weights, which `linnet imagine` can join."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax

from linnet.config.schema import DataConfig, PairsConfig, RunConfig
from linnet.core import params, rng
from linnet.core.pytree import replace
from linnet.models import registry
from linnet.models.prior.config import PriorConfig
from linnet.models.vq.config import VQConfig
from linnet.runs.load import write_run

SHAPE = (4, 4, 3)
PAINTER = RunConfig(
    model=VQConfig(d_model=16, d_k=8, d_v=16, n_code=6, n_layer=1, block_len=8, mem_len=8, d_condition=256, n_place=48),
    data=DataConfig(source="pictures", sequence_len=48, update_len=48, batch_size=2, condition="builtin"),
)
PRIOR = RunConfig(
    family="prior",
    model=PriorConfig(dim=256, depth=1, n_head=1, d_head=8, ff_mult=1, timesteps=8),
    data=PairsConfig(),
    train=dataclasses.replace(PAINTER.train, eval_timesteps=(4,)),
)


def write_untrained(path: Path, cfg: RunConfig) -> Path:
    """Write a run folder with initial weights and return its path."""
    family = registry.get(cfg.family)
    made = params.init(family.param_specs(cfg.model), rng.root(1))
    if getattr(made, "place", None) is not None:  # its initial value is zero: the painter would ignore the embedding
        made = replace(made, place=jax.random.normal(rng.root(3), made.place.shape))
    write_run(path, cfg, made, params.init(family.buffer_specs(cfg.model), rng.root(2)))
    if cfg.family == "vq":
        (path / "data.json").write_text(json.dumps({"shape": SHAPE}))
    return path
