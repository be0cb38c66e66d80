"""One checkpoint on disk: Orbax writes the leaves by name, a manifest beside them proves every one by a checksum.

Written by Orbax's own threads and committed by one rename: a folder with a step for its name is whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array
from orbax.checkpoint import future

from linnet.errors import UserError
from linnet.pytree import named_leaves

STATE, MANIFEST = "state", "manifest"


class Damaged(Exception):
    """What is wrong with one checkpoint's files."""


@dataclasses.dataclass(frozen=True)
class Restored:
    state: Any
    step: int
    extra: dict[str, Any]


@dataclasses.dataclass(frozen=True, repr=False)
class HostCopy:
    """A state off the device: the leaves by name (random keys as their numbers), and what each one is."""

    leaves: dict[str, np.ndarray]
    kinds: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())


def copy_to_host(state: Any) -> HostCopy:
    """Real copies: on CPU a view would share the memory that the next step may overwrite."""
    leaves = {name: np.array(leaf, copy=True, order="C") for name, leaf in _named(state).items()}
    return HostCopy(leaves=leaves, kinds=_kinds(state))


def write(writer: ocp.AsyncCheckpointer, path: Path, step: int, copy: HostCopy, extra: dict[str, Any]) -> None:
    """Begins to write in the background. `writer.wait_until_finished` tells the end, and any failure."""
    arrays, manifest = ocp.args.PyTreeSave(_not_empty(copy.leaves)), _ManifestSave(step=step, extra=extra, copy=copy)
    writer.save(path, args=ocp.args.Composite(state=arrays, manifest=manifest))


@dataclasses.dataclass(repr=False)
class _ManifestSave(ocp.args.CheckpointArgs):
    step: int
    extra: dict[str, Any]
    copy: HostCopy


class _ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes the manifest beside the arrays. The checksums are computed here, in Orbax's thread."""

    async def async_save(self, directory: Any, args: _ManifestSave) -> list[ocp.Future]:  # pyright: ignore
        return [future.CommitFutureAwaitingContractedSignals(self._write(Path(directory), args), name=MANIFEST)]

    async def _write(self, directory: Path, args: _ManifestSave) -> None:
        if jax.process_index() == 0:
            rows = {
                name: {"kind": args.copy.kinds[name], "crc32": _leaf_checksum(name, leaf)}
                for name, leaf in args.copy.leaves.items()
            }
            body = {"step": args.step, "extra": args.extra, "leaves": rows}
            with open(directory / f"{MANIFEST}.json", "w") as file:
                file.write(json.dumps(body | {"crc32": _body_checksum(body)}))
                file.flush()
                os.fsync(file.fileno())  # As TensorStore does with the arrays, so that a power cut loses nothing.

    def save(self, directory: Any, args: _ManifestSave) -> None:
        raise AssertionError("only the asynchronous way is used")

    def restore(self, directory: Any, args: Any = None) -> None:
        raise AssertionError("`read` reads it")


# Orbax wants a class for both ways. Only the first is used.
ocp.args.register_with_handler(_ManifestHandler, for_save=True, for_restore=True)(_ManifestSave)


def new_writer() -> ocp.AsyncCheckpointer:
    # `write` hands over copies of ours, so Orbax need not copy again. Weights do not compress: that time is saved.
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)), (jax.Array, types.ArrayHandler())
    )
    arrays = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    # Folders are made at once: in the background, a process that ends without `close` would wait for them five minutes.
    now = ocp.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CompositeOptions(async_options=now)
    both = ocp.CompositeCheckpointHandler(state=arrays, manifest=_ManifestHandler(), composite_options=options)
    return ocp.AsyncCheckpointer(both, async_options=now)


def read(path: Path, target: Any) -> Restored:
    """Reads one checkpoint and proves its content. `Damaged` if it fails, `UserError` if `target` is another model."""
    manifest = _read_manifest(path)
    _refuse_other_model(path, manifest["leaves"], target)
    wanted = {name: _placed(leaf) for name, leaf in _named(target).items()}
    stored = _not_empty(wanted)
    with contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as reader:
        try:
            how = ocp.checkpoint_utils.construct_restore_args(stored)
            found = reader.restore(path / STATE, args=ocp.args.PyTreeRestore(stored, restore_args=how))
        except (MemoryError, jax.errors.JaxRuntimeError):  # No room for the arrays: the files may well be sound.
            raise
        except Exception as error:  # Damaged files make Orbax and TensorStore raise nearly anything.
            raise Damaged(f"the arrays cannot be read: {short(error)}") from error
    found |= {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in wanted.items() if name not in stored}
    wrong = [n for n, row in manifest["leaves"].items() if _leaf_checksum(n, np.asarray(found[n])) != row["crc32"]]
    if wrong:
        raise Damaged(f"the content of {_some(wrong)} does not match its checksum")
    leaves = [_like(found[name], leaf) for name, leaf in named_leaves(target)]
    state = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return Restored(state=state, step=manifest["step"], extra=manifest["extra"])


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST / f"{MANIFEST}.json"
    try:
        manifest = json.loads(file.read_bytes())
        found = manifest.pop("crc32")
        sound = found == _body_checksum(manifest) and manifest["step"] == int(path.name)
    except FileNotFoundError:
        raise Damaged(f"{file.name} is missing") from None
    except PermissionError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Fix: mend its permissions.") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{file.name} cannot be read: {short(error)}") from error
    if not sound:
        raise Damaged(f"{file.name} does not match its checksum")
    return manifest


def _refuse_other_model(path: Path, rows: dict[str, Any], target: Any) -> None:
    saved, asked = {name: row["kind"] for name, row in rows.items()}, _kinds(target)
    both = saved.keys() & asked.keys()
    faults = {
        "missing in it": sorted(asked.keys() - both),
        "not known to this run": sorted(saved.keys() - both),
        "of another kind": [f"{n} ({saved[n]}, not {asked[n]})" for n in sorted(both) if saved[n] != asked[n]],
    }
    if any(faults.values()):
        found = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise UserError(
            f"The checkpoint {path} belongs to another model or optimiser: {found}. "
            f"Fix: use the settings it was trained with, or another run folder."
        )


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by name, with random keys as their numbers. Works on arrays and on abstract leaves."""
    pairs = list(named_leaves(tree))
    named = {name: _numbers(leaf) for name, leaf in pairs}
    assert len(named) == len(pairs), f"two leaves share a name among {sorted(name for name, _ in pairs)}"
    return named


def _kinds(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf, as in `float32[3, 4]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(tree)}


def _not_empty(leaves: dict[str, Any]) -> dict[str, Any]:
    """Orbax refuses arrays without elements. Their shape and dtype are in the manifest, and that is all of them."""
    return {name: leaf for name, leaf in leaves.items() if leaf.size}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _like(found: Array, leaf: Any) -> Array:
    if not _is_key(leaf):
        return found
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(jnp.empty((), dtype=leaf.dtype)))


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaf_checksum(name: str, leaf: np.ndarray) -> int:
    content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return zlib.crc32(content.data, zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode()))


def _body_checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _some(names: list[str], at_most: int = 8) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


class _NotOrbax(logging.Filter):
    """What Orbax logs is for its authors; what a user must know is raised or logged by Linnet."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return "orbax" not in Path(record.pathname).parts and not _from_orbax(error)


@functools.cache
def hush_orbax() -> None:
    """Keeps Orbax's own words off the terminal, once for the process. Other libraries are heard as before.

    When one array of many fails, Orbax raises that error and abandons the other arrays: closes the event loop under
    them, and leaves their tasks to the garbage collector. Their complaints come later, through these three ways.
    """
    logging.getLogger("absl").addFilter(_NotOrbax())
    logging.getLogger("asyncio").addFilter(_NotOrbax())
    sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _report_unraisable(otherwise: Callable[[Any], None], unraisable: Any) -> None:
    error = unraisable.exc_value
    abandoned = unraisable.object is None and str(error) == "Event loop is closed"
    if not abandoned and not _from_orbax(error):
        otherwise(unraisable)


def _from_orbax(error: BaseException | None) -> bool:
    """Whether an error was raised in Orbax or by TensorStore, whose errors have no frames but always name the store."""
    if error is None:
        return False
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    named = any(words in str(error) for words in ("tensorstore", "OCDBT database", "local file"))
    return named or any("orbax" in Path(file).parts for file in files)
