"""Estimate disk and memory for importing and serving a Grok-1 model, from its config and file headers; no tensor is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.leaves import TensorPair, Tensors, specs_by_name, to_leaves
from linnet.convert.grok.sizes import file_sizes, scale_groups
from linnet.core import params, quant
from linnet.core.dtypes import WEIGHT_DTYPES, WeightDtype
from linnet.core.errors import UserError
from linnet.core.params import Spec
from linnet.models import registry
from linnet.models.moe.config import MoEConfig
from linnet.models.serving_memory import serving_memory
from linnet.parallel.mesh import MESH_AXES
from linnet.runs.stored_array import CHUNK

GB = 1_000_000_000
DEVICES = (1, 2, 4, 8, 16, 32, 64)
MEMORIES = (16, 32, 80, 96, 192)  # GB per device
FREE_FRACTION = 0.1  # fraction of a device reserved for programs and activations
QUANTIZE_COPIES = 4  # live float32 copies of one matrix while it is quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """Memory per device of a model on the mesh with the fewest bytes per device, among those of a number of devices."""

    sizes: Mapping[str, int]
    weights: Mapping[WeightDtype, int]
    """Bytes of weights by storage dtype."""
    slot: int

    @property
    def n_device(self) -> int:
        return int(np.prod(list(self.sizes.values())))

    def fits(self, weights: WeightDtype, memory: float) -> bool:
        return self.total(weights) <= memory * (1 - FREE_FRACTION)

    def total(self, weights: WeightDtype) -> int:
        """Return the bytes of the weights and one slot."""
        return self.weights[weights] + self.slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportPlan:
    n_param: int
    checkpoint_bytes: int
    run_bytes: int
    import_bytes: int
    """Peak memory of the import, in addition to the program."""
    context: int
    meshes: Sequence[MeshMemory]
    """Memory for serving, on one device first."""


def plan_from_config(cfg: MoEConfig) -> ImportPlan:
    """Plan for a checkpoint like the release: 8-bit pairs, each tensor in one file."""
    groups = {
        name: scale_groups(name, spec.shape[-2])
        for name, spec in specs_by_name(cfg).items()
        if spec.min_dtype == "int8"
    }
    largest = max(_largest_tensor(name, spec) for name, spec in specs_by_name(cfg).items())
    return _plan(cfg, groups, sum(file_sizes(cfg)), _run_bytes(cfg, groups), largest + CHUNK)


def plan_from_files(
    cfg: MoEConfig, tensors: Tensors, paths: Sequence[Path], weights: WeightDtype, transposed: bool
) -> ImportPlan:
    """Plan for existing files. `turned`: matrices are stored transposed, and are transposed in memory."""
    specs = specs_by_name(cfg)
    groups = {
        name: found[0].scales.shape[-2] if isinstance(found[0], TensorPair) else 1
        for name, found in tensors.items()
        if specs[name].min_dtype == "int8"
    }
    leaves = to_leaves(tensors, cfg, weights)
    return _plan(
        cfg,
        groups,
        sum(path.stat().st_size for path in paths),
        sum(leaf.nbytes for leaf in leaves),
        _peak_bytes(tensors, specs, weights, transposed) + CHUNK,
    )


def _plan(cfg: MoEConfig, groups: Mapping[str, int], checkpoint: int, run: int, peak: int) -> ImportPlan:
    return ImportPlan(
        n_param=params.count(registry.tokens("moe").param_specs(cfg)),
        checkpoint_bytes=checkpoint,
        run_bytes=run,
        import_bytes=peak,
        context=cfg.context,
        meshes=_best_meshes(cfg, groups),
    )


def _weight_bytes(name: str, spec: Spec, weights: WeightDtype, groups: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes of a weight and of its scales."""
    kind = quant.storage_dtype(spec, weights)
    if kind == "int8":
        return spec.size, 2 * spec.size // spec.shape[-2] * groups[name]
    return spec.size * (4 if kind == "float32" else 2), 0


def _run_bytes(cfg: MoEConfig, groups: Mapping[str, int]) -> int:
    """Return the bytes of the run; what is float in the release stays float32."""
    return sum(
        sum(_weight_bytes(name, spec, "int8" if spec.min_dtype == "int8" else "float32", groups))
        for name, spec in specs_by_name(cfg).items()
    )


def _largest_tensor(name: str, spec: Spec) -> int:
    """Return the bytes of the largest tensor of this leaf in the release: one layer, 8-bit if allowed."""
    in_layer = int(name.startswith("layers/"))
    return int(np.prod(spec.shape[in_layer:])) * (1 if spec.min_dtype == "int8" else 4)


def _peak_bytes(tensors: Tensors, specs: Mapping[str, Spec], weights: WeightDtype, transposed: bool) -> int:
    peak = 0
    for name, found in tensors.items():
        first = found[0]
        tensor = first.weight if isinstance(first, TensorPair) else first
        need = tensor.nbytes * (2 if transposed and len(tensor.shape) > 1 else 1)
        if not isinstance(first, TensorPair):
            wider = 4 if specs[name].min_dtype == "float32" or tensor.dtype == np.float16 else 0
            need += wider * int(np.prod(tensor.shape)) if tensor.dtype != np.float32 else 0
            if weights == "int8" and specs[name].min_dtype == "int8":
                need += QUANTIZE_COPIES * 4 * int(np.prod(tensor.shape[-2:]))
            elif weights != "float32" and specs[name].min_dtype != "float32" and tensor.dtype != jnp.bfloat16:
                need += 2 * int(np.prod(tensor.shape))
        peak = max(peak, need)
    return peak


def _best_meshes(cfg: MoEConfig, groups: Mapping[str, int]) -> list[MeshMemory]:
    """Return the best mesh for each number of devices that has one."""
    meshes: list[MeshMemory] = []
    for n in DEVICES:
        candidates = [_on_mesh(cfg, groups, sizes) for sizes in _valid_meshes(cfg, n)]
        meshes += [min(candidates, key=lambda mesh: mesh.total("int8"))] if candidates else []
    return meshes


def _valid_meshes(cfg: MoEConfig, n: int) -> Iterator[dict[str, int]]:
    """Yield the meshes of n devices that can serve the model. `fsdp` is for training: it would all-gather weights at every step."""
    for i in range(n.bit_length()):
        sizes = dict.fromkeys(MESH_AXES, 1) | {"model": n >> i, "expert": 1 << i}
        try:
            cfg.check_mesh(sizes)
        except UserError:
            continue
        yield sizes


def _on_mesh(cfg: MoEConfig, groups: Mapping[str, int], sizes: Mapping[str, int]) -> MeshMemory:
    memory = {w: serving_memory(registry.tokens("moe"), cfg, sizes, w, groups) for w in WEIGHT_DTYPES}
    weights: dict[WeightDtype, int] = {w: round(memory[w].weight_bytes) for w in WEIGHT_DTYPES}
    return MeshMemory(sizes=sizes, weights=weights, slot=round(memory["int8"].slot_bytes))


def format_plan(plan: ImportPlan) -> str:
    """Format the plan as text."""
    lines = [
        f"Parameters            {plan.n_param:,}",
        f"Checkpoint on disk    {plan.checkpoint_bytes:,} bytes",
        f"Run on disk           {plan.run_bytes:,} bytes more",
        f"Memory for importing  {plan.import_bytes:,} bytes (the largest tensor, in addition to the program)",
        f"Memory for serving, weights and one slot of {plan.context:,} tokens ({_size(plan.meshes[0].slot)}):",
        *(f"  {w:<9} {_size(plan.meshes[0].total(w)):>12}" for w in reversed(WEIGHT_DTYPES)),
        f"Weights that fit by memory per device, with {FREE_FRACTION:.0%} kept free (sizes are per device):",
        f"  {'devices':<8}{'mesh':<30}{'int8':>10}{'bfloat16':>10}  " + "".join(f"{m:>13} GB" for m in MEMORIES),
    ]
    for mesh in plan.meshes:
        axes = " ".join(f"{name}={n}" for name, n in mesh.sizes.items() if n > 1) or "-"
        sizes = "".join(f"{_size(mesh.total(w)):>10}" for w in ("int8", "bfloat16"))
        fits = "".join(f"{_fitting(mesh, m * GB):>16}" for m in MEMORIES)
        lines.append(f"  {mesh.n_device:<8}{axes:<30}{sizes}  {fits}")
    return "\n".join(lines)


def _size(n: int) -> str:
    return f"{n / GB:,.1f} GB" if n >= GB else f"{n / 1e6:,.2f} MB"


def _fitting(mesh: MeshMemory, memory: float) -> str:
    dtypes: tuple[WeightDtype, ...] = ("int8", "bfloat16")
    return " ".join(w for w in dtypes if mesh.fits(w, memory)) or "no"
