"""Reading of one checkpoint: the leaves by name, in Orbax's format, and a manifest with a checksum for each leaf.

A folder whose name is a step is complete (see `writer`). It can be read on any mesh and by any number of processes, which all
call `read_checkpoint` together: each one reads only the shards it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array

from linnet.core.errors import UserError
from linnet.parallel import multihost
from linnet.runs.checkpoint import checksum, host_shards

log = logging.getLogger("linnet")

STATE, MANIFEST = "state", "manifest"


class CorruptCheckpoint(Exception):
    """The files of a checkpoint are damaged; the message describes the damage."""


@dataclasses.dataclass(frozen=True)
class Restored:
    state: Any
    step: int
    extra: dict[str, Any]


def read_checkpoint(path: Path, target: Any, *, partial: bool = False) -> Restored:
    """Read one checkpoint and verify its checksums.

    Raises `CorruptCheckpoint` if the files are damaged, and `UserError` if `target` is another model. With `partial`, `target` may
    lack top-level parts of the saved state (for example the optimizer state), which are then neither read nor verified. All
    processes reach the same result: if one of them cannot read or verify its shards, the checkpoint is damaged for all.
    """
    manifest, found, fault = {}, {}, None
    try:
        manifest = _read_manifest(path)
        manifest["leaves"] = _wanted(manifest["leaves"], target) if partial else manifest["leaves"]
        _check_same_model(path, manifest["leaves"], target)
        found = _read_arrays(path, target)
        report = {"fault": None, "damaged": True, "sums": _local_sums(found, manifest["leaves"])}
    except Exception as error:
        fault, report = error, {"fault": str(error), "damaged": isinstance(error, CorruptCheckpoint), "sums": {}}
    reports = multihost.all_gather_json(report)
    _raise_faults(fault, reports)
    _verify_checksums(found, manifest["leaves"], [each["sums"] for each in reports])
    leaves = [_like(found[name], leaf) for name, leaf in host_shards.stored_leaves(target)]
    state = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return Restored(state=state, step=manifest["step"], extra=manifest["extra"])


def checksums(path: Path) -> dict[str, Any]:
    """Return checksum, dtype and shape of every leaf by name, to compare checkpoints without reading their arrays."""
    try:
        return _read_manifest(path)["leaves"]
    except CorruptCheckpoint as why:
        raise UserError(f"The checkpoint {path} is damaged ({why}). Fix: use another checkpoint.") from why


def _wanted(rows: dict[str, Any], target: Any) -> dict[str, Any]:
    """Select the rows of the parts (first component of the name) that `target` has.

    A part is always complete, so that a checkpoint of another model is still rejected.
    """
    parts = {name.partition("/")[0] for name in host_shards.kinds(target)}
    return {name: row for name, row in rows.items() if name.partition("/")[0] in parts}


def _raise_faults(fault: Exception | None, reports: list[dict[str, Any]]) -> None:
    """Raise if any process failed: damage if all failures are damage, else this process's own error or another's."""
    if all(report["fault"] is None for report in reports):
        return
    if all(report["damaged"] for report in reports):
        raise CorruptCheckpoint(next(report["fault"] for report in reports if report["fault"] is not None)) from fault
    if fault is not None and not isinstance(fault, CorruptCheckpoint):
        raise fault
    process, fault_message = next((i, report["fault"]) for i, report in enumerate(reports) if not report["damaged"])
    raise UserError(f"Process {process} cannot read the checkpoint: {fault_message}")


def _read_arrays(path: Path, target: Any) -> dict[str, Array]:
    """Read the leaves by name, only the shards that this process needs."""
    wanted = {name: _with_sharding(leaf) for name, leaf in host_shards.named(target).items()}
    stored, myself = host_shards.not_empty(wanted), jax.process_index()
    # Read without barriers: if one process fails, the others must be able to continue and learn of it.
    alone = ocp.options.MultiprocessingOptions(primary_host=myself, active_processes={myself})
    arrays = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with contextlib.closing(ocp.Checkpointer(arrays, multiprocessing_options=alone)) as reader:
        try:
            how = ocp.checkpoint_utils.construct_restore_args(stored)
            found = reader.restore(
                path / STATE, args=ocp.args.PyTreeRestore(stored, restore_args=how, partial_restore=True)
            )
        except (MemoryError, jax.errors.JaxRuntimeError):  # Out of memory: the files may be intact.
            raise
        except Exception as error:  # Damaged files can raise almost any exception in Orbax and TensorStore.
            raise CorruptCheckpoint(f"the arrays cannot be read: {short(error)}") from error
    for name, leaf in wanted.items():
        if name not in stored:
            found[name] = jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index, leaf=leaf: np.zeros(leaf.shape, leaf.dtype)[index]
            )
    return found


def _local_sums(found: dict[str, Array], rows: dict[str, Any]) -> dict[str, int]:
    return {name: checksum.of_addressable(found[name]) for name, row in rows.items() if "sum" in row}


def _verify_checksums(found: dict[str, Array], rows: dict[str, Any], sums: list[dict[str, int]]) -> None:
    """Verify the checksums of what all processes together have read."""
    wrong, unverified = [], []
    for name, row in rows.items():
        leaf = found[name]
        if "sum" in row:
            # A leaf that is fully addressable was read completely by every process.
            expected = row["sum"] * checksum.copies(leaf) * (len(sums) if leaf.is_fully_addressable else 1)
            is_verified = (sum(each[name] for each in sums) - expected) % checksum.MODULUS == 0
        elif leaf.is_fully_addressable or leaf.is_fully_replicated:
            is_verified = _crc32(name, np.asarray(leaf)) == row["crc32"]
        else:
            unverified.append(name)
            continue
        if not is_verified:
            wrong.append(name)
    if wrong := sorted({name for each in multihost.all_gather_json(wrong) for name in each}):
        raise CorruptCheckpoint(f"the content of {_some(wrong)} does not match its checksum")
    if unverified and jax.process_index() == 0:
        log.warning(
            "This checkpoint has checksums of complete arrays, as earlier versions wrote them. They could not be verified for %s, "
            "which several processes share. New checkpoints can be verified on any mesh, so there is nothing to fix.",
            _some(unverified),
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST / f"{MANIFEST}.json"
    try:
        manifest = json.loads(file.read_bytes())
        found = manifest.pop("crc32")
        is_sound = found == body_checksum(manifest) and manifest["step"] == int(path.name)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{file.name} is missing") from None
    except PermissionError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Fix: correct its permissions.") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpoint(f"{file.name} cannot be read: {short(error)}") from error
    if not is_sound:
        raise CorruptCheckpoint(f"{file.name} does not match its checksum")
    return manifest


def _check_same_model(path: Path, rows: dict[str, Any], target: Any) -> None:
    saved, wanted = {name: row["kind"] for name, row in rows.items()}, host_shards.kinds(target)
    both = saved.keys() & wanted.keys()
    faults = {
        "missing in it": sorted(wanted.keys() - both),
        "not known to this run": sorted(saved.keys() - both),
        "of another kind": [f"{n} ({saved[n]}, not {wanted[n]})" for n in sorted(both) if saved[n] != wanted[n]],
    }
    if any(faults.values()):
        found = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise UserError(
            f"The checkpoint {path} belongs to another model or optimizer: {found}. "
            f"Fix: use the settings it was trained with, or another run folder."
        )


def _like(found: Array, leaf: Any) -> Array:
    if not host_shards.is_key(leaf):
        return found
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(jnp.empty((), dtype=leaf.dtype)))


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _crc32(name: str, leaf: np.ndarray) -> int:
    """Checksum of a complete leaf, as in manifests of earlier versions."""
    content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return zlib.crc32(content.data, zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode()))


def body_checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _some(names: list[str], at_most: int = 8) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more
