"""Plan of a training run: its update is compiled for its mesh from shapes, for memory per device, FLOPs and collectives.

As a program (`python -m linnet.plan.training`) it reads runs as JSON from stdin and writes one plan per line of JSON, on fake devices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from linnet.config.codec import run_from_dict
from linnet.config.schema import RunConfig
from linnet.data.batch import Batch
from linnet.data.embeddings.pairs import PairBatch
from linnet.models import registry
from linnet.models.base import ModelFamily
from linnet.models.model_config import PairModelConfig
from linnet.nn import moe as experts
from linnet.optim.lora import trainable_specs
from linnet.optim.optimizer import optimizer as make_optimizer
from linnet.parallel import sharding
from linnet.parallel.mesh import data_parallel_size, mesh_text, n_devices, parse_mesh
from linnet.plan import program
from linnet.plan.compiling import compile_for_reading, use_fake_devices
from linnet.plan.result import MAX_DEVICES, DeviceMemory, TrainingPlan, to_json, useful_flops
from linnet.runs.state import abstract_state
from linnet.train.step import make_step


def plan_training(cfg: RunConfig, max_devices: int = MAX_DEVICES) -> TrainingPlan:
    """Plan the update of a run. For a mesh larger than `max_devices`, a part with a shorter data axis and the same rows per device is
    compiled, so that memory and work per device are the same; collectives along that axis are extrapolated to its full length."""
    sizes = parse_mesh(cfg.mesh)
    part, times = _shorten_data_axis(cfg, max_devices)
    part_sizes = parse_mesh(part.mesh)
    memory, costs = _compile(part)
    if times > 1:
        costs = program.on_more_rows(costs, n_devices(part_sizes), part_sizes["data"], times)
    return TrainingPlan(
        mesh=mesh_text(sizes),
        n_device=n_devices(sizes),
        rows=cfg.data.batch_size,
        memory=memory,
        program=costs,
        useful_flops=useful_flops(cfg),
        dtype=cfg.model.dtype,
        compiled_mesh=part.mesh if times > 1 else None,
        assumed_turns=even_turns(part) if costs.n_assumed else None,
    )


@functools.cache
def _compile(cfg: RunConfig) -> tuple[DeviceMemory, program.Program]:
    """Compile and analyze the update. Cached, because one part may represent several meshes."""
    mesh = sharding.make_mesh(parse_mesh(cfg.mesh))
    family: ModelFamily = registry.get(cfg.family)
    optimizer = make_optimizer(cfg.optim, trainable_specs(family, cfg))
    state = abstract_state(family, cfg, optimizer, mesh)
    batch = abstract_batch(cfg, family, mesh)
    with jax.set_mesh(mesh):
        compiled = compile_for_reading(make_step(family, cfg, optimizer, mesh).lower(state, batch))
    turns = even_turns(cfg)
    costs = program.read(
        compiled.text,
        partitioned_hlo=compiled.partitioned_hlo,
        trips=None if turns is None else lambda _: turns,
        element=jnp.dtype(cfg.model.dtype).itemsize,
    )
    memory = DeviceMemory(
        parameters=sharding.bytes_per_device((state.params, state.base)),
        optimizer=sharding.bytes_per_device(state.opt_state),
        average=sharding.bytes_per_device(state.ema),
        codebooks=sharding.bytes_per_device(state.buffers),
        carry=sharding.bytes_per_device(state.carry),
        batch=sharding.bytes_per_device(batch),
        temporary=compiled.temporary_bytes,
        results=compiled.output_bytes,
    )
    return memory, costs


def _shorten_data_axis(cfg: RunConfig, max_devices: int) -> tuple[RunConfig, int]:
    """Return the run with its data axis halved until it can be compiled, and the factor by which it is shorter."""
    sizes, times = parse_mesh(cfg.mesh), 1
    while n_devices(sizes) > max_devices and sizes["data"] % 4 == 0:
        sizes["data"] //= 2  # at least 2 remain, because an axis of size 1 has no collectives to extrapolate
        times *= 2
    data: Any = dataclasses.replace(cfg.data, batch_size=cfg.data.batch_size // times)
    return dataclasses.replace(cfg, mesh=mesh_text(sizes), data=data), times


def even_turns(cfg: RunConfig) -> float | None:
    """Return the trip count of the loop over an expert's tokens with a uniform load, or None without experts. No other loop of an
    update has a data-dependent trip count."""
    if cfg.model.routing is None:
        return None
    n_expert, n_choice = cfg.model.routing
    sizes = parse_mesh(cfg.mesh)
    rows = cfg.data.batch_size // cfg.train.accumulate // data_parallel_size(sizes)
    # With expert parallelism each device processes the tokens of all devices along the expert axis.
    pairs = rows * cfg.tokens.update_len * sizes["expert"] * n_choice
    height = experts.training_block(pairs, n_expert // sizes["expert"])
    return float(math.ceil(pairs / n_expert / height))


def abstract_batch(cfg: RunConfig, family: ModelFamily, mesh: Mesh) -> Any:
    """Return the shapes, dtypes and shardings of a training batch."""
    rows = cfg.data.batch_size

    def array(dtype: Any, *rest: int) -> Any:
        shape = (rows, *rest)
        by_rows = sharding.named_sharding(shape, ("batch", *(None,) * len(rest)), mesh, family.rules)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

    model = cfg.model
    if isinstance(model, PairModelConfig):
        encodings = array(jnp.float32, model.max_text_len, model.d_text) if model.text_encodings else None
        return PairBatch(
            text_embed=array(jnp.float32, model.d_text),
            image_embed=array(jnp.float32, model.dim),
            encodings=encodings,
            mask=array(jnp.float32),
        )
    tokens = array(jnp.int32, cfg.tokens.update_len)
    return Batch(
        inputs=tokens,
        targets=tokens,
        doc_ids=tokens,
        loss_mask=array(jnp.float32, cfg.tokens.update_len),
        condition=array(jnp.float32, cfg.d_condition) if cfg.d_condition else None,
    )


def main() -> None:
    task = json.load(sys.stdin)
    configs = [run_from_dict(values) for values in task["runs"]]
    use_fake_devices(min(MAX_DEVICES, max(n_devices(parse_mesh(cfg.mesh)) for cfg in configs)))
    for cfg in configs:
        print(json.dumps(to_json(plan_training(cfg, task["max_devices"]))), flush=True)


if __name__ == "__main__":
    main()
