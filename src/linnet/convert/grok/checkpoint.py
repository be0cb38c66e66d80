"""Read Grok-1's released checkpoint: `ckpt-0/tensorNNNNN_SSS`, one pickle per shard of each tensor.

A shard is the part of one host of the (data, model) mesh that wrote the checkpoint: host d * M + m has part d of the axis sharded
over `data` and part m of the axis sharded over `model`; what is sharded over neither is in every shard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.leaves import Tensor, TensorPair, Tensors, specs_by_name
from linnet.convert.grok.names import QUANTIZED, ShardAxis, Weight, file_order
from linnet.convert.grok.pickle_reader import StoredPair, read_pickle
from linnet.convert.grok.settings import CHECKPOINT
from linnet.convert.grok.settings import FILE as SETTINGS
from linnet.core.errors import UserError, invalid
from linnet.models.moe.config import MoEConfig
from linnet.runs.stored_array import StoredArray

FILE = re.compile(r"tensor(\d{5})_(\d{3})")
Slices = tuple[slice, ...]


def find_folder(path: Path) -> Path | None:
    """Return the folder with the tensors: the given one, or ckpt-0 in it."""
    for folder in (path, path / CHECKPOINT):
        if folder.is_dir() and any(FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    return None


def read_checkpoint(folder: Path, cfg: MoEConfig) -> Tensors:
    """Check every file against the config before any tensor is read."""
    order, files = file_order(cfg), _files(folder)
    _check_complete(folder, files, len(order), cfg)
    specs, found = specs_by_name(cfg), dict[str, dict[int, Tensor | TensorPair]]()
    for number, (name, weight, layer) in enumerate(order):
        shape = specs[weight.leaf].shape[0 if layer is None else 1 :]
        label = f"{files[number][0].name} ({name.removeprefix('params/')})"
        found.setdefault(weight.leaf, {})[layer or 0] = _tensor(label, files[number], weight, shape)
    return {leaf: [layers[i] for i in sorted(layers)] for leaf, layers in found.items()}  # pyright: ignore[reportReturnType]


def checkpoint_files(folder: Path) -> list[Path]:
    return [path for shards in _files(folder).values() for path in shards]


def _files(folder: Path) -> dict[int, list[Path]]:
    """Return the files by tensor number, in shard order."""
    shards: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == SETTINGS:
            continue
        match = FILE.fullmatch(path.name)
        if match is None or not path.is_file():
            raise UserError(f"{path} is not part of a checkpoint (tensorNNNNN_SSS). Fix: move it elsewhere.")
        shards.setdefault(int(match[1]), {})[int(match[2])] = path
    for number, of in shards.items():
        if set(of) != set(range(len(of))):
            missing = min(set(range(len(of))) - set(of))
            raise UserError(f"{folder} has no tensor{number:05d}_{missing:03d}. Fix: download the missing shard.")
    return {number: [of[i] for i in range(len(of))] for number, of in shards.items()}


def _check_complete(folder: Path, files: dict[int, list[Path]], n: int, cfg: MoEConfig) -> None:
    wanted = set(range(n))
    if set(files) == wanted:
        return
    missing, extra = sorted(wanted - set(files)), sorted(set(files) - wanted)
    first = f"tensor{(missing or extra)[0]:05d}_000"
    what = f"has no {first} ({len(missing)} missing)" if missing else f"has {first} ({len(extra)} extra)"
    raise UserError(
        f"{folder} {what}: a model of {cfg.n_layer} layers has the tensors 0 to {n - 1}. Fix: download what is missing, or give "
        "the model's sizes with --settings if they are not the published ones."
    )


def _tensor(label: str, paths: Sequence[Path], weight: Weight, shape: tuple[int, ...]) -> Tensor | TensorPair:
    shards = [read_pickle(path) for path in paths]
    pairs, arrays = [s for s in shards if isinstance(s, StoredPair)], [s for s in shards if isinstance(s, StoredArray)]
    if pairs and (arrays or weight.leaf not in QUANTIZED):
        raise invalid(label, "an 8-bit pair", "an array of float32", "use files of one checkpoint only")
    if pairs:
        return _pair(label, pairs, weight, shape)
    for array in arrays:
        if array.dtype not in (np.float32, jnp.bfloat16):
            raise invalid(label, str(array.dtype), "an array of floats or an 8-bit pair", "use the file of the release")
    return _join_shards(
        label, arrays, shard_slices(label, shape, [array.shape for array in arrays], weight.splits), shape
    )


def _pair(label: str, pairs: Sequence[StoredPair], weight: Weight, shape: tuple[int, ...]) -> TensorPair:
    weights, scales = [p.weight for p in pairs], [p.scales for p in pairs]
    at = shard_slices(label, shape, [array.shape for array in weights], weight.splits)
    sizes = set[int]()
    for one, its in zip(weights, scales, strict=True):
        alike = len(its.shape) == len(one.shape) and (*its.shape[:-2], its.shape[-1]) == (
            *one.shape[:-2],
            one.shape[-1],
        )
        if not alike or one.shape[-2] % its.shape[-2]:
            needs = f"{one.shape} with {one.shape[-2]} reduced to a number that divides it"
            raise invalid(f"the scales' shape in {label}", its.shape, needs, "use the file of the release")
        sizes.add(one.shape[-2] // its.shape[-2])
    if len(sizes) > 1:
        raise invalid(f"the rows of one scale in {label}", sorted(sizes), "the same in all shards", "download it again")
    (rows,) = sizes
    _check_scales(label, scales, at)
    scale_at = [(*p[:-2], slice(p[-2].start // rows, p[-2].stop // rows), p[-1]) for p in at]
    scale_shape = (*shape[:-2], shape[-2] // rows, shape[-1])
    return TensorPair(
        weight=_join_shards(label, weights, at, shape), scales=_join_shards(label, scales, scale_at, scale_shape)
    )


def _check_scales(label: str, scales: Sequence[StoredArray], at: Sequence[Slices]) -> None:
    """Check that shards of the input rows have the scales of their own rows.

    Equal groups in all shards could be a copy of the complete tensor's scales, and then the rows of a scale would be ambiguous.
    """
    same_columns: dict[str, list[np.ndarray]] = {}
    for array, place in zip(scales, at, strict=True):
        if array.shape[-2] > 1 and len({(p[-2].start, p[-2].stop) for p in at}) > 1:
            same_columns.setdefault(str((*place[:-2], place[-1])), []).append(array.read())
    for values in same_columns.values():
        one = np.array_equal(values[0], np.broadcast_to(values[0][..., :1, :], values[0].shape))
        if not one and all(np.array_equal(value, values[0]) for value in values):
            needs = "those of each shard's own rows"
            raise invalid(f"the scales of {label}", "equal in every shard", needs, "join its shards to one file")


def shard_slices(
    label: str, shape: tuple[int, ...], shards: Sequence[tuple[int, ...]], splits: tuple[ShardAxis, ...]
) -> list[Slices]:
    """Return the slices of each shard in the full tensor. Copies have the same slices."""
    full = tuple(slice(0, n) for n in shape)
    if any(len(shard) != len(shape) for shard in shards):
        raise _shape_error(label, shape, shards)
    divided = [axis for axis, n in enumerate(shape) if any(shard[axis] != n for shard in shards)]
    if not divided:
        return [full] * len(shards)
    if len(divided) == 1 and sum(shard[divided[0]] for shard in shards) == shape[divided[0]]:
        ends = np.cumsum([shard[divided[0]] for shard in shards]).tolist()
        return [
            _replace_axes(full, {divided[0]: (end - s[divided[0]], end)}) for end, s in zip(ends, shards, strict=True)
        ]
    if len(set(shards)) > 1 or any(n % m for n, m in zip(shape, shards[0], strict=True)):
        raise _shape_error(label, shape, shards)
    mesh: dict[ShardAxis, int] = {split: shape[a] // shards[0][a] for a, split in enumerate(splits) if split}
    n_data = mesh.get("data", len(shards) // mesh.get("model", len(shards)))
    n_model = mesh.get("model", len(shards) // n_data)
    if n_data * n_model != len(shards) or any(splits[axis] not in ("data", "model") for axis in divided):
        raise _shape_error(label, shape, shards)
    found: list[Slices] = []
    for i in range(len(shards)):
        part = {"data": i // n_model, "model": i % n_model}
        sizes = {axis: shards[0][axis] for axis in divided}
        found.append(
            _replace_axes(
                full, {a: (part[str(splits[a])] * n, (part[str(splits[a])] + 1) * n) for a, n in sizes.items()}
            )
        )
    return found


def _replace_axes(full: Slices, bounds: dict[int, tuple[int, int]]) -> Slices:
    return tuple(slice(*bounds[axis]) if axis in bounds else s for axis, s in enumerate(full))


def _shape_error(label: str, shape: tuple[int, ...], shards: Sequence[tuple[int, ...]]) -> UserError:
    got = str(shards[0]) if len(shards) == 1 else f"{len(shards)} shards of {', '.join(map(str, sorted(set(shards))))}"
    return UserError(
        f"{label} is {got}, but the model's sizes need {shape}. Fix: give the sizes with --settings if they are not the "
        "published ones, or download the file again."
    )


def _join_shards(label: str, arrays: Sequence[StoredArray], at: Sequence[Slices], shape: tuple[int, ...]) -> Tensor:
    types = {array.dtype for array in arrays}
    if len(types) > 1:
        raise invalid(f"the dtypes of {label}", sorted(map(str, types)), "one for all shards", "download it again")

    def read() -> np.ndarray:
        values, done = np.empty(shape, arrays[0].dtype), dict[str, StoredArray]()
        for array, place in zip(arrays, at, strict=True):
            first = done.setdefault(str(place), array)
            if first is array:
                array.read_into(values[place])
            elif first.sha256() != array.sha256():
                raise UserError(
                    f"{label}: {array.path.name} should be a copy of {first.path.name}, and is not. Fix: download both again."
                )
        return values

    return Tensor(label=label, shape=shape, dtype=arrays[0].dtype, read=read)
