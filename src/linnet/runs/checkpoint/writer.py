"""Asynchronous writing of one checkpoint through Orbax's asynchronous checkpointer, each process writing its shards.

A checkpoint has two items: the arrays, written by Orbax, and the manifest with their checksums. Orbax runs a barrier when all
processes have written. Then process 0 merges their manifests and Orbax commits the checkpoint by one rename, so a folder whose name
is a step is always complete. A process that cannot write its shards (for example on a full disk) must still reach the barrier, or
the others would wait for it. Its failure is therefore stored until `wait`, which raises it in all processes, and nothing is committed.

Orbax's `CheckpointManager` is not used. It commits or fails in each process separately, so the failure of one process would make the
others wait for the barrier's timeout of 20 minutes. It also deletes old checkpoints without regard to those that cannot be read.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from linnet.parallel import multihost
from linnet.runs.checkpoint import checksum, host_shards
from linnet.runs.checkpoint.reader import MANIFEST, body_checksum, short

Futures = list[Any]
"""Orbax's futures: their protocol cannot be checked at run time."""
CHUNK = 32 * 2**20  # Bytes. Shards of one chunk are written directly; larger ones are copied once more.


class PeerLost(Exception):
    """A peer process ended, or did not reach the barrier at the end of a save."""


class _Missing(OSError):
    """Process 0 found no manifest from some process."""


@dataclasses.dataclass(repr=False)
class _ManifestSave(ocp.args.CheckpointArgs):
    step: int
    extra: dict[str, Any]
    boxes: dict[str, list[checksum.Box]]
    kinds: dict[str, str]


class _ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes the manifest next to the arrays: each process writes the checksums of its shards, and process 0 adds them up.

    The checksums are computed here, on Orbax's thread.
    """

    directory = Path()

    async def async_save(self, directory: Any, args: _ManifestSave) -> Futures:  # pyright: ignore
        self.directory = Path(directory)
        return [future.CommitFutureAwaitingContractedSignals(self._write(args), name=MANIFEST)]

    async def _write(self, args: _ManifestSave) -> None:
        rows = {name: {"kind": args.kinds[name], "sum": checksum.of_boxes(boxes)} for name, boxes in args.boxes.items()}
        body = {"step": args.step, "extra": args.extra, "leaves": rows}
        self.part(jax.process_index()).write_text(json.dumps(body))

    def part(self, process: int) -> Path:
        return self.directory / f"part-{process}.json"

    def finalize(self, directory: Any) -> None:
        """Merge the manifests. Called on process 0 when all have written, before the checkpoint is renamed."""
        parts = [self.part(process) for process in range(jax.process_count())]
        body, *others = [json.loads(part.read_text()) for part in parts]
        for name, row in body["leaves"].items():
            row["sum"] = (row["sum"] + sum(other["leaves"][name]["sum"] for other in others)) % checksum.MODULUS
        with open(self.directory / f"{MANIFEST}.json", "w") as file:
            file.write(json.dumps(body | {"crc32": body_checksum(body)}))
            file.flush()
            os.fsync(file.fileno())  # As TensorStore does for the arrays, so that a power failure loses nothing.
        for part in parts:
            part.unlink()

    def save(self, directory: Any, args: _ManifestSave) -> None:
        raise AssertionError("only the asynchronous way is used")

    def restore(self, directory: Any, args: Any = None) -> None:
        raise AssertionError("`reader.read_checkpoint` reads it")


# Orbax requires a class for both saving and restoring. Only saving is used.
ocp.args.register_with_handler(_ManifestHandler, for_save=True, for_restore=True)(_ManifestSave)


class _Handler(ocp.CompositeCheckpointHandler):
    """Writes both items. The first error of this process is stored in `fault`."""

    def __init__(self, arrays: ocp.PyTreeCheckpointHandler, options: ocp.AsyncOptions) -> None:
        self.manifest = _ManifestHandler()
        self.fault: Exception | None = None
        super().__init__(
            state=arrays, manifest=self.manifest, composite_options=ocp.CompositeOptions(async_options=options)
        )

    async def async_save(self, directory: Any, args: _Items) -> Futures:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [_Kept(self, await super().async_save(directory, args) or [])]

    def finalize(self, directory: Any) -> None:
        """Complete the checkpoint on process 0, when all have written. Orbax commits it only if this raises nothing."""
        missing = [i for i in range(jax.process_count()) if not self.manifest.part(i).exists()]
        if missing:
            raise _Missing(f"the shards of processes {missing} are missing")
        super().finalize(directory)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """The arguments of `_Handler`: Orbax finds a handler by the class of its arguments."""


@dataclasses.dataclass(frozen=True, repr=False)
class _Kept(ocp.Future):
    """Waits for the writes of this process. On failure, stores the error and removes its manifest part."""

    owner: _Handler
    futures: Futures

    def result(self, timeout: float | None = None) -> None:
        for each in self.futures:
            try:
                each.result(timeout)
            except Exception as error:
                self.owner.fault = self.owner.fault or error
        if self.owner.fault is not None:
            self.owner.manifest.part(jax.process_index()).unlink(missing_ok=True)


class Writer:
    """Writes checkpoints asynchronously. All processes must call its methods together."""

    def __init__(self) -> None:
        # Each shard is written once, by one process, as in `host_shards`. The sharding is not stored: it is given again when
        # reading. Compression is off because weights do not compress.
        types = ocp.type_handlers
        pieces = types.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
        registry = types.create_type_handler_registry((jax.Array, pieces))
        arrays = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        # Directories are created synchronously: otherwise a process that exits without `close` would wait for them for five
        # minutes.
        options = ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=self._barrier)
        self._all_written = False
        self._handler = _Handler(arrays, options)
        self._checkpointer = ocp.AsyncCheckpointer(self._handler, async_options=options)

    def write(self, path: Path, step: int, copy: host_shards.HostShards, extra: dict[str, Any]) -> None:
        """Start writing in the background. `wait` returns when it is done, and raises any failure."""
        stored = host_shards.not_empty(copy.arrays)
        # In chunks, so that a process that needs part of a shard (on another mesh) reads little more than that part.
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), stored)
        manifest = _ManifestSave(step=step, extra=extra, boxes=copy.boxes, kinds=copy.kinds)
        self._all_written = False
        self._checkpointer.save(path, args=_Items(state=ocp.args.PyTreeSave(stored, save_args=how), manifest=manifest))

    def wait(self) -> None:
        """Wait until the checkpoint is committed. Raises in all processes if any of them could not write."""
        uncommitted: Exception | None = None
        try:
            self._checkpointer.wait_until_finished()
        except TimeoutError as error:  # Also raised when the barrier fails because a process is gone.
            raise PeerLost("another process of this run has ended, or did not write its shards in time") from error
        except Exception as error:
            uncommitted = error
        fault, self._handler.fault = self._handler.fault or uncommitted, None
        faults = multihost.all_gather_json([None if fault is None else short(fault), isinstance(fault, _Missing)])
        if fault is not None and not isinstance(fault, _Missing):
            raise fault
        # A process's own error takes precedence over process 0 reporting that its manifest is missing.
        reasons = sorted(
            (late, process, message) for process, (message, late) in enumerate(faults) if message is not None
        )
        if reasons:
            raise OSError(f"process {reasons[0][1]}: {reasons[0][2]}") from fault

    def close(self) -> None:
        self._checkpointer.close()

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes have written: the first barrier of a save.

        Orbax has a second one, after the commit. It is left out: if process 0 cannot commit, it never reaches it, and `wait`
        gathers all processes anyway.
        """
        if not self._all_written:
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
            self._all_written = True
