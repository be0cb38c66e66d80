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
from linnet.convert.npz import list_npz
from linnet.core import files
from linnet.core.errors import UserError
from linnet.core.params import is_spec
from linnet.core.pytree import named_leaves
from linnet.core.quant import Quantized, Weight
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams, param_specs

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
    found = read_json(path)
    if isinstance(found, dict) and isinstance(found.get("runs"), list):
        return "runner", path
    if isinstance(found, list) and found and all(isinstance(row, list) and len(row) == 5 for row in found):
        return "order", path
    if isinstance(found, dict) and "ffn_size" in found and (path.parent / UNITS).is_file():
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


def model_of(path: Path) -> tuple[MoEConfig, Tensors]:
    """Return the model in the folder of a reference file: config.json and ckpt-0."""
    settings, folder = path.parent / SETTINGS, find_folder(path.parent)
    if not settings.is_file() or folder is None:
        raise UserError(f"{path} needs its model beside it: {SETTINGS} and ckpt-0. Fix: keep them in one folder.")
    cfg = grok_config(settings)
    return cfg, read_checkpoint(folder, cfg)


def model_for_runner(path: Path) -> Path:
    """Return the folder of the model that a runner's streams came from.

    It is beside the file and has the same sizes; if there are several, the one that the file names (`model`), or is named after.
    """
    sizes = set(param_shapes(grok_config(path)).items())
    folders = [
        folder
        for folder in sorted({path.parent, *(p for p in path.parent.iterdir() if p.is_dir())})
        if (folder / SETTINGS).is_file()
        and find_folder(folder) is not None
        and set(param_shapes(grok_config(folder / SETTINGS)).items()) == sizes
    ]
    own = read_json(path).get("model")
    named = [folder for folder in folders if folder.name == own]
    named = named or [folder for folder in folders if _letters(folder.name) in _letters(path.stem)]
    found = named or folders
    if len(found) != 1:
        what = "no model of its sizes" if not found else f"{len(found)} models of its sizes"
        raise UserError(
            f"{path} has {what} beside it (a folder with {SETTINGS} and ckpt-0). Fix: keep the file beside its model."
        )
    return found[0]


def param_shapes(cfg: MoEConfig) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in named_leaves(param_specs(cfg), is_leaf=is_spec)}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def load_params(tensors: Tensors, cfg: MoEConfig) -> MoEParams:
    """Load the weights as in the release: 8-bit pairs stay pairs."""
    specs = param_specs(cfg)
    leaves = [_stacked(tensors[name], spec.shape) for name, spec in named_leaves(specs, is_leaf=is_spec)]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def _stacked(tensors: Sequence[Tensor] | Sequence[TensorPair], shape: tuple[int, ...]) -> Weight:
    pairs, floats = [t for t in tensors if isinstance(t, TensorPair)], [t for t in tensors if isinstance(t, Tensor)]
    if pairs and floats:
        raise UserError(f"{floats[0].label} is of {floats[0].dtype}, but other layers have an 8-bit pair there.")
    if not pairs:
        return _joined(floats).reshape(shape)
    scales = _joined([pair.scales for pair in pairs])
    weight = _joined([pair.weight for pair in pairs]).reshape(shape)
    return Quantized(weight=weight, scales=scales.reshape(*shape[:-2], *scales.shape[-2:]))


def _joined(tensors: Sequence[Tensor]) -> jax.Array:
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) > 1:
        raise UserError(f"{tensors[0].label} and the same of other layers differ in shape: {sorted(shapes)}.")
    return jnp.asarray(np.stack([tensor.read() for tensor in tensors]))
