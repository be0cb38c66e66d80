"""Estimate disk and memory for importing and serving a Grok-1 model, from its config and file headers; no tensor is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from linnet.convert.grok.leaves import Pair, Tensors, specs_by_name, to_leaves
from linnet.convert.grok.sizes import file_sizes, scale_groups
from linnet.core import params, quant
from linnet.core.dtypes import WEIGHT_DTYPES, WeightDtype
from linnet.core.params import Spec
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES, param_specs
from linnet.parallel import sharding
from linnet.runs.stored_array import CHUNK

GB = 1_000_000_000
DEVICES = (1, 2, 4, 8, 16, 32, 64)
MEMORIES = (16, 32, 80, 96, 192)  # GB per device
FREE = 0.1  # fraction of a device reserved for programs and activations
QUANTIZING = 4  # live float32 copies of one matrix while it is quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sharding of a model over a number of devices: the mesh with the fewest bytes per device."""

    sizes: Mapping[str, int]
    held: Mapping[WeightDtype, int]
    """Bytes of weights per device, by storage dtype."""
    cache: int

    @property
    def n_device(self) -> int:
        return int(np.prod(list(self.sizes.values())))

    def fits(self, weights: WeightDtype, memory: float) -> bool:
        return self.held[weights] + self.cache <= memory * (1 - FREE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    n_param: int
    checkpoint_bytes: int
    run_bytes: int
    import_bytes: int
    """Peak memory of the import, beside the program itself."""
    held: Mapping[WeightDtype, int]
    """Bytes of weights in memory while serving, by storage dtype."""
    cache_bytes: int
    context: int
    meshes: Sequence[Mesh]


def plan_from_config(cfg: MoEConfig) -> Plan:
    """Plan for a checkpoint like the release: 8-bit pairs, each tensor in one file."""
    groups = {
        name: scale_groups(name, spec.shape[-2]) for name, spec in specs_by_name(cfg).items() if spec.least == "int8"
    }
    largest = max(_largest(name, spec) for name, spec in specs_by_name(cfg).items())
    return _plan(cfg, groups, sum(file_sizes(cfg)), _run_bytes(cfg, groups), largest + CHUNK)


def plan_from_files(
    cfg: MoEConfig, tensors: Tensors, paths: Sequence[Path], weights: WeightDtype, turned: bool
) -> Plan:
    """Plan for existing files. `turned`: matrices are stored transposed, and are transposed in memory."""
    specs = specs_by_name(cfg)
    groups = {
        name: found[0].scales.shape[-2] if isinstance(found[0], Pair) else 1
        for name, found in tensors.items()
        if specs[name].least == "int8"
    }
    leaves = to_leaves(tensors, cfg, weights)
    return _plan(
        cfg,
        groups,
        sum(path.stat().st_size for path in paths),
        sum(leaf.nbytes for leaf in leaves),
        _peak(tensors, specs, weights, turned) + CHUNK,
    )


def _plan(cfg: MoEConfig, groups: Mapping[str, int], checkpoint: int, run: int, peak: int) -> Plan:
    specs = specs_by_name(cfg)
    return Plan(
        n_param=params.count(param_specs(cfg)),
        checkpoint_bytes=checkpoint,
        run_bytes=run,
        import_bytes=peak,
        held={w: sum(sum(_parts(name, spec, w, groups)) for name, spec in specs.items()) for w in WEIGHT_DTYPES},
        cache_bytes=_cache(cfg),
        context=cfg.context,
        meshes=[_mesh(cfg, specs, groups, n) for n in DEVICES],
    )


def _parts(name: str, spec: Spec, weights: WeightDtype, groups: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes of a weight and of its scales."""
    kind = quant.storage_dtype(spec, weights)
    if kind == "int8":
        return spec.size, 2 * spec.size // spec.shape[-2] * groups[name]
    return spec.size * (4 if kind == "float32" else 2), 0


def _run_bytes(cfg: MoEConfig, groups: Mapping[str, int]) -> int:
    """Return the bytes of the run; what is float in the release stays float32."""
    return sum(
        sum(_parts(name, spec, "int8" if spec.least == "int8" else "float32", groups))
        for name, spec in specs_by_name(cfg).items()
    )


def _largest(name: str, spec: Spec) -> int:
    """Return the bytes of the largest tensor of this leaf in the release: one layer, 8-bit if allowed."""
    in_layer = int(name.startswith("layers/"))
    return int(np.prod(spec.shape[in_layer:])) * (1 if spec.least == "int8" else 4)


def _peak(tensors: Tensors, specs: Mapping[str, Spec], weights: WeightDtype, turned: bool) -> int:
    peak = 0
    for name, found in tensors.items():
        first = found[0]
        tensor = first.weight if isinstance(first, Pair) else first
        need = tensor.nbytes * (2 if turned and len(tensor.shape) > 1 else 1)
        if not isinstance(first, Pair):
            wider = 4 if specs[name].least == "float32" or tensor.dtype == np.float16 else 0
            need += wider * int(np.prod(tensor.shape)) if tensor.dtype != np.float32 else 0
            if weights == "int8" and specs[name].least == "int8":
                need += QUANTIZING * 4 * int(np.prod(tensor.shape[-2:]))
            elif weights != "float32" and specs[name].least != "float32" and tensor.dtype != jnp.bfloat16:
                need += 2 * int(np.prod(tensor.shape))
        peak = max(peak, need)
    return peak


def _cache(cfg: MoEConfig) -> int:
    """Return the bytes of the KV cache of one full slot."""
    return 2 * cfg.n_layer * cfg.context * cfg.n_kv_head * cfg.d_k * jnp.dtype(cfg.dtype).itemsize


def _mesh(cfg: MoEConfig, specs: Mapping[str, Spec], groups: Mapping[str, int], n: int) -> Mesh:
    """Return the best mesh of n devices. `fsdp` is for training: it would all-gather every weight at every step."""
    ways = [{"model": n >> i, "expert": 1 << i} for i in range(n.bit_length())]
    found = [_laid_out(cfg, specs, groups, way) for way in ways]
    return min(found, key=lambda mesh: mesh.held["int8"] + mesh.cache)


def _laid_out(cfg: MoEConfig, specs: Mapping[str, Spec], groups: Mapping[str, int], sizes: dict[str, int]) -> Mesh:
    whole = {name: sizes.get(name, 1) for name in sharding.MESH_AXES}
    mesh = AbstractMesh(tuple(whole.values()), tuple(whole), axis_types=(AxisType.Auto,) * len(whole))
    held = dict.fromkeys(WEIGHT_DTYPES, 0)
    for name, spec in specs.items():
        cuts = sharding.partition(spec.shape, spec.axes, mesh, RULES)
        pieces = int(np.prod([whole[axis] for axis in cuts if isinstance(axis, str)]))
        for weights in WEIGHT_DTYPES:
            held[weights] += sum(-(-part // pieces) for part in _parts(name, spec, weights, groups))
    heads = sizes["model"] if cfg.n_kv_head % sizes["model"] == 0 else 1
    return Mesh(sizes=sizes, held=held, cache=_cache(cfg) // heads)


def show(plan: Plan) -> str:
    """Format the plan as text."""
    lines = [
        f"Parameters            {plan.n_param:,}",
        f"Checkpoint on disk    {plan.checkpoint_bytes:,} bytes",
        f"Run on disk           {plan.run_bytes:,} bytes more",
        f"Memory while importing  {plan.import_bytes:,} bytes (the largest tensor, beside the program itself)",
        "Memory while serving, weights and one slot of "
        f"{plan.context:,} tokens ({_size(plan.cache_bytes)} of keys and values):",
        *(f"  {w:<9} {_size(plan.held[w] + plan.cache_bytes):>12}" for w in reversed(WEIGHT_DTYPES)),
        f"Where it fits, with {FREE:.0%} of a device kept free (GB of one device across; bytes are of one device):",
        f"  {'devices':<8}{'mesh':<30}{'int8':>10}{'bfloat16':>10}  " + "".join(f"{m:>16}" for m in MEMORIES),
    ]
    for mesh in plan.meshes:
        cut = " ".join(f"{name}={n}" for name, n in mesh.sizes.items() if n > 1) or "-"
        sizes = "".join(f"{_size(mesh.held[w] + mesh.cache):>10}" for w in ("int8", "bfloat16"))
        fits = "".join(f"{_words(mesh, m * GB):>16}" for m in MEMORIES)
        lines.append(f"  {mesh.n_device:<8}{cut:<30}{sizes}  {fits}")
    return "\n".join(lines)


def _size(n: int) -> str:
    return f"{n / GB:,.1f} GB" if n >= GB else f"{n / 1e6:,.2f} MB"


def _words(mesh: Mesh, memory: float) -> str:
    held: list[WeightDtype] = [w for w in ("int8", "bfloat16") if mesh.fits(w, memory)]
    return " ".join(held) or "no"
