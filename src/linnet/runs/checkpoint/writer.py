"""Asynchronous writing of one checkpoint through Orbax, each process writing its shards.

Orbax runs a barrier when all processes have written. Then process 0 merges their manifests and commits the checkpoint by one
rename, so a folder whose name is a step is always complete. A process that cannot write its shards (for example on a full
disk) must still reach the barrier, or the others would wait for it. Its failure is therefore stored until `wait`, which
raises it in all processes, and nothing is committed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from linnet.parallel import multihost as together
from linnet.runs.checkpoint import checksum
from linnet.runs.checkpoint import host_shards as shares
from linnet.runs.checkpoint.reader import MANIFEST, body_checksum, short

CHUNK = 32 * 2**20  # Bytes. Shards of one chunk are written directly; larger ones are copied once more.


class Deserted(Exception):
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

    async def async_save(self, directory: Any, args: _ManifestSave) -> list[ocp.Future]:  # pyright: ignore
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


class Writer(ocp.AsyncCheckpointer):
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
        now = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CompositeOptions(async_options=now)
        self.manifest = _ManifestHandler()
        self.fault: Exception | None = None
        both = ocp.CompositeCheckpointHandler(state=arrays, manifest=self.manifest, composite_options=options)
        super().__init__(both, async_options=now)

    def write(self, path: Path, step: int, copy: shares.HostShards, extra: dict[str, Any]) -> None:
        """Start writing in the background. `wait` returns when it is done, and raises any failure."""
        stored = shares.not_empty(copy.arrays)
        # In chunks, so that a process that needs part of a shard (on another mesh) reads little more than that part.
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), stored)
        manifest = _ManifestSave(step=step, extra=extra, boxes=copy.boxes, kinds=copy.kinds)
        self.save(path, args=ocp.args.Composite(state=ocp.args.PyTreeSave(stored, save_args=how), manifest=manifest))

    def wait(self) -> None:
        """Wait until the checkpoint is committed. Raises in all processes if any of them could not write."""
        try:
            self.wait_until_finished()
        except TimeoutError as error:  # Also raised when the barrier fails because a process is gone.
            raise Deserted("another process of this run has ended, or did not write its share in time") from error
        fault, self.fault = self.fault, None
        told = together.all_gather_json([None if fault is None else short(fault), isinstance(fault, _Missing)])
        if fault is not None and not isinstance(fault, _Missing):
            raise fault
        # A process's own error takes precedence over process 0 reporting that its manifest is missing.
        reasons = sorted((late, process, words) for process, (words, late) in enumerate(told) if words is not None)
        if reasons:
            raise OSError(f"process {reasons[0][1]}: {reasons[0][2]}") from fault

    async def _save(self, *args: Any, **named: Any) -> list[ocp.Future]:
        return [_Kept(self, await super()._save(*args, **named))]

    def _make_on_commit_callback(self, tmpdir: Any, *args: Any) -> Callable[[], None]:  # pyright: ignore
        """Return the commit callback of process 0, called when all have written. Orbax makes the others wait for it."""
        commit = super()._make_on_commit_callback(tmpdir, *args)

        def commit_if_whole() -> None:
            missing = [i for i in range(jax.process_count()) if not self.manifest.part(i).exists()]
            try:
                if missing:
                    raise _Missing(f"the shares of the processes {missing} are missing")
                commit()
            except Exception as error:
                self.fault = self.fault or error
                shutil.rmtree(Path(tmpdir.get()), ignore_errors=True)

        return commit_if_whole


@dataclasses.dataclass(frozen=True, repr=False)
class _Kept(ocp.Future):
    """Waits for the writes of this process. On failure, stores the error and removes its manifest part."""

    owner: Writer
    futures: list[ocp.Future]

    def result(self, timeout: float | None = None) -> None:
        for each in self.futures:
            try:
                each.result(timeout)
            except Exception as error:
                self.owner.fault = self.owner.fault or error
        if self.owner.fault is not None:
            self.owner.manifest.part(jax.process_index()).unlink(missing_ok=True)
