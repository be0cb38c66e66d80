"""Mesh search: choose candidate meshes for a run and a number of devices, and the best of their plans."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from linnet.config.schema import RunConfig
from linnet.core import params
from linnet.core.errors import UserError, invalid
from linnet.models import registry
from linnet.models.serving_memory import shape_bytes
from linnet.parallel.mesh import MESH_AXES, data_parallel_size, mesh_text, n_devices, parse_mesh
from linnet.plan import result, roofline
from linnet.plan.chips import Chip
from linnet.plan.formatting import format_bytes
from linnet.plan.result import MAX_DEVICES, TrainingPlan

SHORT_LIST = 4
"""Maximum number of meshes compiled if none is given. Each takes seconds to a minute to compile."""


def plan_in_subprocess(runs: Sequence[RunConfig], max_devices: int = MAX_DEVICES) -> Iterator[TrainingPlan]:
    """Yield the plans of these runs, compiled in a separate process: fake devices must be set up before JAX is initialized."""
    command = [sys.executable, "-m", "linnet.plan.training"]
    with (
        tempfile.TemporaryFile("w+") as output,  # compiler output, shown only on failure
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            json.dump({"runs": [dataclasses.asdict(cfg) for cfg in runs], "max_devices": max_devices}, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                yield result.from_json(json.loads(line))
        except BaseException:
            process.kill()
            raise
        if process.wait():
            output.seek(0)
            raise RuntimeError(f"compiling the plan failed (exit code {process.returncode}):\n{output.read()[-4000:]}")


def enumerate_meshes(cfg: RunConfig, n: int) -> list[RunConfig]:
    """Return the run on every mesh of `n` devices that is valid for it."""
    valid: list[RunConfig] = []
    for sizes in _factorizations(n, len(MESH_AXES)):
        try:
            valid.append(dataclasses.replace(cfg, mesh=mesh_text(dict(zip(MESH_AXES, sizes, strict=True)))))
        except UserError:
            continue
    return valid


def _factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (n,)
        return
    for first in (size for size in range(1, n + 1) if n % size == 0):
        yield from ((first, *rest) for rest in _factorizations(n // first, axes - 1))


def with_enough_rows(cfg: RunConfig, n: int) -> RunConfig:
    """Return the run itself if some mesh of `n` devices is valid for it; otherwise with one row per device."""
    if enumerate_meshes(cfg, n):
        return cfg
    data: Any = dataclasses.replace(cfg.data, batch_size=n * cfg.train.accumulate)
    return dataclasses.replace(cfg, data=data)


def short_list(cfg: RunConfig, n: int, hbm: float) -> list[RunConfig]:
    """Return the candidate meshes: those whose state is estimated to fit with the least communication; if none fits, those with the
    least state per device."""
    if n < 1:
        raise invalid("--devices", n, "at least 1", "use the number of devices you have")
    estimates = [(estimate(run), run) for run in enumerate_meshes(cfg, n)]
    fitting = [pair for pair in estimates if pair[0].state_bytes <= hbm]
    if fitting:
        chosen = sorted(fitting, key=lambda pair: pair[0].sent_bytes)
    else:
        chosen = sorted(estimates, key=lambda pair: pair[0].state_bytes)
    return [run for _, run in chosen[:SHORT_LIST]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Rough estimate in bytes per device, used only to choose which meshes to compile."""

    state_bytes: float
    sent_bytes: float


def estimate(cfg: RunConfig) -> Estimate:
    sizes, family, model = parse_mesh(cfg.mesh), registry.get(cfg.family), cfg.model
    weights = 4.0 * params.count(family.param_specs(model))
    copies = 1 + {"adamw": 2.0, "muon": 1.0, "lion": 1.0, "adafactor": 0.01}[cfg.optim.name]
    copies += 1 + (cfg.train.ema_decay is not None)  # gradients, and an average
    mine = weights / (sizes["fsdp"] * sizes["model"] * sizes["expert"])
    element, layers = (2 if model.dtype == "bfloat16" else 4), model.n_block
    rows = cfg.data.batch_size * cfg.data.n_per_row * model.width * element / data_parallel_size(sizes)

    def ring(axis: str) -> float:
        return (sizes[axis] - 1) / sizes[axis]

    sent = 2 * mine * ring("data")
    sent += ring("fsdp") * weights / (sizes["model"] * sizes["expert"]) * (1 + 2 * element / 4)
    sent += 2 * 4 * layers * rows * ring("model") + 4 * layers * rows * sizes["expert"] * ring("expert")
    carried = cfg.data.updates_per_sequence > 1
    state = mine * copies + (_carry_bytes(cfg) / (data_parallel_size(sizes) * sizes["model"]) if carried else 0.0)
    return Estimate(state_bytes=state, sent_bytes=sent)


def _carry_bytes(cfg: RunConfig) -> float:
    import jax

    return float(
        shape_bytes(jax.eval_shape(lambda: registry.get(cfg.family).empty_carry(cfg.model, cfg.data.batch_size)))
    )


def recommended(plans: Sequence[TrainingPlan], chip: Chip, hbm: float) -> TrainingPlan | None:
    """Return the plan with the least communication time among those that fit, or None."""

    def communication(plan: TrainingPlan) -> float:
        return roofline.times(plan.program, plan.memory.state, chip, plan.dtype).communication

    return min((plan for plan in plans if plan.memory.total <= hbm), key=communication, default=None)


def suggestions(cfg: RunConfig, plans: Sequence[TrainingPlan], hbm: float) -> list[str]:
    """Return suggested changes for a run that does not fit, the cheapest first."""
    least = min(plans, key=lambda plan: plan.memory.total)
    changes: list[str] = []
    sizes = parse_mesh(least.mesh)
    if least.memory.state > hbm:
        total = least.memory.state * least.n_device
        need = 2 ** math.ceil(math.log2(total / hbm))
        changes.append(
            f"more devices: the training state alone, {format_bytes(total)}, needs {need} of them, sharded by fsdp"
        )
    if cfg.model.remat != "full":
        changes.append("--model.remat full: recompute activations instead of storing them")
    rows = cfg.data.batch_size // cfg.train.accumulate // data_parallel_size(sizes)
    if rows > 1:
        changes.append(f"--train.accumulate {cfg.train.accumulate * rows}: one row per device at a time")
    elif cfg.reads_tokens:
        changes.append("a shorter --data.update-len: a single row does not fit")
    if least.memory.optimizer > least.memory.parameters:
        changes.append("--optim.name adafactor: an optimizer with very little state")
    if sizes["data"] > 1:
        changes.append("a mesh with fsdp instead of data: weights are sharded, not replicated")
    if not changes:
        changes.append(f"more devices than {least.n_device}, along fsdp or model")
    return changes


def remat_plans(cfg: RunConfig) -> list[RunConfig]:
    """Return the run with each rematerialization setting."""
    models: list[Any] = [dataclasses.replace(cfg.model, remat=remat) for remat in ("none", "some", "full")]
    return [dataclasses.replace(cfg, model=model) for model in models]


def check_agree(cfg: RunConfig, devices: int | None) -> None:
    sizes = parse_mesh(cfg.mesh)
    if devices is not None and devices < 1:
        raise invalid("--devices", devices, "at least 1", "use 8")
    if devices is not None and cfg.mesh and n_devices(sizes) != devices:
        needs = f"as many as the mesh has ({n_devices(sizes)})"
        raise invalid("--devices", devices, needs, "leave one of --devices and --mesh out")
