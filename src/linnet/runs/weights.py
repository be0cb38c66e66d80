"""Weights-only runs: config.json and `weights/`, without optimizer state, so that a model larger than memory can be imported.

Each leaf is a safetensors file (an 8-bit leaf has two arrays, NAME/weight and NAME/scales); index.json lists them with their
SHA-256. Such a run is evaluated, sampled, served and exported like any other, and trained from step 0 if its weights are floats.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError, invalid
from linnet.core.files import read_json
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import leaf_name, named_leaves
from linnet.data.sources.locations import with_base
from linnet.runs.folder import RunFolder
from linnet.runs.stored_array import TYPE_NAMES, Leaf, StoredArray, read_safetensors, write_safetensors
from linnet.runs.weights_file import PAIR

FOLDER, INDEX = codec.IMPORTED_WEIGHTS.parts
VERSION = 1
OVERHEAD = 1 << 20  # bytes for headers and index


def has_weights(run: Path) -> bool:
    return (run / FOLDER / INDEX).is_file()


def is_weights_only(run: Path) -> bool:
    """Whether the run is imported and not is_trained yet. Once it has checkpoints, those take precedence."""
    checkpoints = RunFolder(run).checkpoints
    is_trained = checkpoints.is_dir() and any(entry.name.isdecimal() for entry in checkpoints.iterdir())
    return has_weights(run) and not is_trained


def is_quantized(run: Path) -> bool:
    return any(leaf["dtype"] == "I8" for leaf in _index(run).values())


def fingerprint(run: Path) -> str:
    """Return a hash over the names, shapes, dtypes and SHA-256 of all leaves."""
    known = {name: [leaf["shape"], leaf["dtype"], leaf["sha256"]] for name, leaf in _index(run).items()}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


# Writing.


def write_stored_run(
    out: Path, cfg: RunConfig, leaves: Sequence[Leaf], finish: Callable[[Path], None], log: Callable[[str], None]
) -> None:
    """Write a weights-only run atomically: it appears as `out` only when complete. `finish` adds other files (a tokenizer)."""
    check_is_new(out)
    with _temporary_folder(out) as part:
        need, free = sum(leaf.nbytes for leaf in leaves) + OVERHEAD, shutil.disk_usage(part).free
        if need > free:
            raise invalid("--out", str(out), f"on a disk with {need:,} bytes free (it has {free:,})", "free some space")
        write_weights(part, leaves, log)
        finish(part)
        codec.save(with_base(cfg), part / "config.json")
        check_is_new(out)
        os.rename(part, out)  # replaces an empty folder


def model_leaves(params: Any) -> list[Leaf]:
    """Return the leaves of a model in memory."""

    def one(name: str, value: np.ndarray) -> Leaf:
        return Leaf(name=name, shape=value.shape, dtype=value.dtype, parts=lambda: iter([value]))

    return [one(name, np.asarray(value)) for name, value in named_leaves(params)]


def check_is_new(out: Path) -> None:
    if (out / "config.json").exists():
        raise UserError(f"{out} already contains a run, which is not overwritten. Fix: choose another --out.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists and is not empty. Fix: choose another --out.")


@contextlib.contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """Temporary folder next to the run, removed if anything fails.

    Its lock distinguishes the leftovers of a dead import from the files of one that is still running.
    """
    part = out.absolute().with_name(f".{out.absolute().name}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        lock = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise invalid("--out", str(out), f"a folder that can be written ({error.strerror})", "choose another") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(lock).st_ino == part.stat().st_ino
        except OSError:  # locked by another process, or renamed meanwhile
            is_ours = False
        if not is_ours:
            raise UserError(f"{out} is being imported by another process. Fix: wait for it.")
        try:
            shutil.rmtree(part / FOLDER, ignore_errors=True)
            yield part
        except OSError as error:
            raise UserError(
                f"{out} cannot be written ({error.strerror or error}). Fix: free some space there."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(lock)


def write_weights(run: Path, leaves: Sequence[Leaf], log: Callable[[str], None]) -> None:
    folder = run / FOLDER
    folder.mkdir(parents=True)
    index: dict[str, Any] = {}
    for file, members in _files(leaves).items():
        size = sum(leaf.nbytes for leaf in members)
        log(f"{file}: {size:,} bytes")
        sums = write_safetensors(folder / file, members, {"format": "linnet-weights"})
        for leaf in members:
            described = {"shape": list(leaf.shape), "dtype": TYPE_NAMES[leaf.dtype], "file": file}
            index[leaf.name] = {**described, "sha256": sums[leaf.name]}
    (folder / INDEX).write_text(json.dumps({"version": VERSION, "leaves": index}, indent=1) + "\n")


def _files(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    files: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        base, _, last = leaf.name.rpartition("/")
        name = base if last in PAIR else leaf.name
        files.setdefault(f"{name.replace('/', '.')}.safetensors", []).append(leaf)
    return files


# Reading.


def read_weights(
    run: Path,
    specs: Any,
    weights: WeightDtype = "float32",
    to_device: Callable[[Spec, Any], Any] = lambda _, leaf: leaf,
) -> Any:
    """Read the params tree leaf by leaf: each is verified, cast to `weights`, and put on the devices by `to_device`."""
    index = _index(run)
    files = {name: read_safetensors(run / FOLDER / name)[0] for name in {leaf["file"] for leaf in index.values()}}
    wanted: set[str] = set()

    def load(path: tuple[Any, ...], spec: Spec) -> Any:
        name = leaf_name(path)
        names = [name] if name in index else [f"{name}/{part}" for part in PAIR]
        wanted.update(names)
        leaf = _leaf(run, spec, [_array(run, index, files, n) for n in names], index, names)
        return to_device(spec, quant.cast_params(leaf, spec, weights))

    tree = jax.tree_util.tree_map_with_path(load, specs, is_leaf=is_spec)
    if set(index) - wanted:
        odd = sorted(set(index) - wanted)[0]
        raise UserError(
            f"{run / FOLDER} has {odd!r}, which the model of its config.json does not have. Fix: import it again."
        )
    return tree


def check_trainable(run: Path) -> None:
    if is_quantized(run):
        raise UserError(
            f"{run} has 8-bit weights, which cannot be trained: an update is smaller than their quantization step. Fix: train "
            f"adapters on top of them (`linnet train --from {run} --lora.rank 8 --out RUN`), import a float conversion (`linnet "
            "import grok-1` on safetensors, without --weights int8), or write one with "
            f"`linnet export {run} --format grok-hf` and import that."
        )


def _index(run: Path) -> dict[str, Any]:
    path = run / FOLDER / INDEX
    try:
        index = read_json(path)
        leaves = index["leaves"]
        if index["version"] != VERSION:
            raise invalid(f"version of {path}", index["version"], str(VERSION), "use the Linnet that wrote it")
        for leaf in leaves.values():
            if not {"shape", "dtype", "file", "sha256"} <= set(leaf) or Path(leaf["file"]).name != leaf["file"]:
                raise ValueError("the description of a leaf is incomplete")
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}). Fix: import the model again.") from None
    return leaves


def _array(run: Path, index: dict[str, Any], files: dict[str, dict[str, StoredArray]], name: str) -> StoredArray:
    known = index.get(name)
    array = None if known is None else files[known["file"]].get(name)
    if known is None or array is None:
        raise UserError(f"{run / FOLDER} has no {name!r}. Fix: import the model again.")
    if list(array.shape) != known["shape"] or TYPE_NAMES[array.dtype] != known["dtype"]:
        raise UserError(f"{array.path} and {INDEX} disagree about {name!r}. Fix: import the model again.")
    return array


def _leaf(run: Path, spec: Spec, arrays: list[StoredArray], index: dict[str, Any], names: list[str]) -> Any:
    shape = arrays[0].shape
    fits = shape == spec.shape
    if len(arrays) == 2:
        scales = arrays[1].shape
        fits = fits and len(scales) == len(shape) and (*scales[:-2], scales[-1]) == (*shape[:-2], shape[-1])
        fits = fits and scales[-2] > 0 and shape[-2] % scales[-2] == 0
        fits = fits and arrays[0].dtype == np.int8 and arrays[1].dtype == jnp.bfloat16
    if not fits:
        got = [array.shape for array in arrays]
        raise invalid(f"{names[0]} in {run / FOLDER}", got, f"of shape {spec.shape}", "import the model again")
    values = [_verify(array, index[name]["sha256"], name) for array, name in zip(arrays, names, strict=True)]
    return values[0] if len(values) == 1 else quant.Quantized(weight=values[0], scales=values[1])


def _verify(array: StoredArray, sha256: str, name: str) -> jax.Array:
    values = array.read()
    if hashlib.sha256(values.reshape(-1).view(np.uint8).data).hexdigest() != sha256:
        raise UserError(
            f"{name} in {array.path} is not what was imported: it was changed or damaged. Fix: import it again."
        )
    return jnp.asarray(values)
