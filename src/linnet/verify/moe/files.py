"""Reference files of Grok-1's release: detect the layout of a path, and load the model that belongs to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.checkpoint import find_folder, read_checkpoint
from linnet.convert.grok.leaves import Tensor, TensorPair, Tensors
from linnet.convert.grok.settings import FILE as SETTINGS
from linnet.convert.grok.settings import grok_config
from linnet.convert.npz import list_npz, read_npz
from linnet.core import files
from linnet.core.errors import UserError
from linnet.core.params import is_spec
from linnet.core.pytree import named_leaves
from linnet.core.quant import Quantized, Weight
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams, param_specs
from linnet.verify.golden import Golden

Layout = Literal["forward", "units", "runner", "order"]
FORWARD, UNITS = "forward.npz", "units.npz"
UNIT_GROUPS = ("rope", "rms", "gelu", "softcap", "qlinear", "top_p", "sample")


def grok_layout(path: Path) -> tuple[Layout, Path] | None:
    """Return the layout and the file to read; None if it is none of these, and another reader reports the error."""
    if path.is_dir():
        layouts: dict[str, Layout] = {FORWARD: "forward", UNITS: "units"}
        return next(((layout, path / name) for name, layout in layouts.items() if (path / name).is_file()), None)
    if path.suffix == ".json" and path.is_file():
        return _json_layout(path)
    names = _npz_names(path)
    if "meta" in names:
        return None
    if "tokens" in names:
        return "forward", path
    return ("units", path) if any(name.partition("/")[0] in UNIT_GROUPS for name in names) else None


def _json_layout(path: Path) -> tuple[Layout, Path]:
    content = read_json(path)
    if isinstance(content, dict) and isinstance(content.get("runs"), list):
        return "runner", path
    if isinstance(content, list) and content and all(isinstance(row, list) and len(row) == 5 for row in content):
        return "order", path
    if isinstance(content, dict) and "ffn_size" in content and (path.parent / UNITS).is_file():
        return "units", path.parent / UNITS
    raise UserError(
        f"{path} is not a reference file: it has neither a runner's token streams ('runs') nor a list of tensors. "
        "Fix: see the layouts `linnet verify` reads."
    )


def _npz_names(path: Path) -> set[str]:
    try:
        return list_npz(path)
    except UserError:
        return set()


def read_json(path: Path) -> Any:
    try:
        return files.read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). Fix: copy it again.") from None


def read_grok_golden(path: Path, layout: Layout) -> Golden:
    """Read the arrays of a file. They have no meta: the model, if any, is beside the file."""
    return Golden(path=path, meta={"kind": f"grok {layout}"}, arrays=read_npz(path))


def read_model(path: Path) -> tuple[MoEConfig, Tensors]:
    """Read the model in the folder of a reference file: config.json and ckpt-0."""
    settings, folder = path.parent / SETTINGS, find_folder(path.parent)
    if not settings.is_file() or folder is None:
        raise UserError(f"{path} needs its model beside it: {SETTINGS} and ckpt-0. Fix: keep them in one folder.")
    cfg = grok_config(settings)
    return cfg, read_checkpoint(folder, cfg)


def find_runner_model(path: Path) -> Path:
    """Find the folder of the model that a runner's streams came from.

    It is beside the file and has the same sizes. Of several, it is the one that the file names (`model`) or whose name is part of the
    file's name.
    """
    sizes = set(param_shapes(grok_config(path)).items())
    folders = [
        folder
        for folder in sorted({path.parent, *(p for p in path.parent.iterdir() if p.is_dir())})
        if (folder / SETTINGS).is_file()
        and find_folder(folder) is not None
        and set(param_shapes(grok_config(folder / SETTINGS)).items()) == sizes
    ]
    stated = read_json(path).get("model")
    named = [folder for folder in folders if folder.name == stated]
    named = named or [folder for folder in folders if _letters(folder.name) in _letters(path.stem)]
    candidates = named or folders
    if len(candidates) != 1:
        what = "no model of its sizes" if not candidates else f"{len(candidates)} models of its sizes"
        raise UserError(
            f"{path} has {what} beside it (a folder with {SETTINGS} and ckpt-0). Fix: keep the file beside its model."
        )
    return candidates[0]


def param_shapes(cfg: MoEConfig) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in named_leaves(param_specs(cfg), is_leaf=is_spec)}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def load_params(tensors: Tensors, cfg: MoEConfig) -> MoEParams:
    """Load the weights as in the release: 8-bit pairs stay pairs."""
    specs = param_specs(cfg)
    leaves = [_stack_layers(tensors[name], spec.shape) for name, spec in named_leaves(specs, is_leaf=is_spec)]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def _stack_layers(tensors: Sequence[Tensor] | Sequence[TensorPair], shape: tuple[int, ...]) -> Weight:
    pairs, floats = [t for t in tensors if isinstance(t, TensorPair)], [t for t in tensors if isinstance(t, Tensor)]
    if pairs and floats:
        raise UserError(f"{floats[0].label} has the dtype {floats[0].dtype}, but in other layers it is an 8-bit pair.")
    if not pairs:
        return _stack(floats).reshape(shape)
    scales = _stack([pair.scales for pair in pairs])
    weight = _stack([pair.weight for pair in pairs]).reshape(shape)
    return Quantized(weight=weight, scales=scales.reshape(*shape[:-2], *scales.shape[-2:]))


def _stack(tensors: Sequence[Tensor]) -> jax.Array:
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) > 1:
        raise UserError(f"{tensors[0].label} has different shapes in different layers: {sorted(shapes)}.")
    return jnp.asarray(np.stack([tensor.read() for tensor in tensors]))
