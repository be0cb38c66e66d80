"""Writes one checkpoint in the background: each process its share of the leaves, through Orbax.

Orbax brings the processes together when all have written; then the first one joins what they wrote and commits it by
one rename: a folder with a step for its name is whole. A process that cannot write its share (its disk is full, say)
must still come to that meeting, or the others would wait for it: so its failure is kept for `wait`, where all hear of
it, and nothing is committed.
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

from linnet.runs.checkpoint import checksum
from linnet.runs.checkpoint import host_shards as shares
from linnet.parallel import multihost as together
from linnet.runs.checkpoint.reader import MANIFEST, body_checksum, short

CHUNK = 32 * 2**20  # Bytes. Pieces of one chunk are written as they stand; those of more are copied once again.


class Deserted(Exception):
    """Not all processes came to the end of a save."""


class _Missing(OSError):
    """The first process finds no manifest of another one."""


@dataclasses.dataclass(repr=False)
class _ManifestSave(ocp.args.CheckpointArgs):
    step: int
    extra: dict[str, Any]
    boxes: dict[str, list[checksum.Box]]
    kinds: dict[str, str]


class _ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes the manifest beside the arrays: each process the checksums of its pieces, and the first one their sums.

    The checksums are computed here, in Orbax's thread.
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
        """Called in the first process when all have written, and before the checkpoint gets its name."""
        parts = [self.part(process) for process in range(jax.process_count())]
        body, *others = [json.loads(part.read_text()) for part in parts]
        for name, row in body["leaves"].items():
            row["sum"] = (row["sum"] + sum(other["leaves"][name]["sum"] for other in others)) % checksum.MODULUS
        with open(self.directory / f"{MANIFEST}.json", "w") as file:
            file.write(json.dumps(body | {"crc32": body_checksum(body)}))
            file.flush()
            os.fsync(file.fileno())  # As TensorStore does with the arrays, so that a power cut loses nothing.
        for part in parts:
            part.unlink()

    def save(self, directory: Any, args: _ManifestSave) -> None:
        raise AssertionError("only the asynchronous way is used")

    def restore(self, directory: Any, args: Any = None) -> None:
        raise AssertionError("`snapshot.read` reads it")


# Orbax wants a class for both ways. Only the first is used.
ocp.args.register_with_handler(_ManifestHandler, for_save=True, for_restore=True)(_ManifestSave)


class Writer(ocp.AsyncCheckpointer):
    """All processes call its methods together."""

    def __init__(self) -> None:
        # Each piece is written once and whole, as in `shares`, and no mesh is noted: it is told again when reading.
        # Weights do not compress: that time is saved.
        types = ocp.type_handlers
        pieces = types.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
        registry = types.create_type_handler_registry((jax.Array, pieces))
        arrays = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        # Folders are made at once: in the background, a process that ends without `close` would wait for them five
        # minutes.
        now = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CompositeOptions(async_options=now)
        self.manifest = _ManifestHandler()
        self.fault: Exception | None = None
        both = ocp.CompositeCheckpointHandler(state=arrays, manifest=self.manifest, composite_options=options)
        super().__init__(both, async_options=now)

    def write(self, path: Path, step: int, copy: shares.HostShards, extra: dict[str, Any]) -> None:
        """Begins to write in the background. `wait` tells the end, and any failure."""
        stored = shares.not_empty(copy.arrays)
        # In chunks: whoever needs a part of a piece, on another mesh, reads little more than that part.
        how = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), stored)
        manifest = _ManifestSave(step=step, extra=extra, boxes=copy.boxes, kinds=copy.kinds)
        self.save(path, args=ocp.args.Composite(state=ocp.args.PyTreeSave(stored, save_args=how), manifest=manifest))

    def wait(self) -> None:
        """Returns when the checkpoint is committed. Raises in all processes if any of them could not write."""
        try:
            self.wait_until_finished()
        except TimeoutError as error:  # Also when Orbax hears at the meeting that another process is gone.
            raise Deserted("another process of this run has ended, or did not write its share in time") from error
        fault, self.fault = self.fault, None
        told = together.all_gather_json([None if fault is None else short(fault), isinstance(fault, _Missing)])
        if fault is not None and not isinstance(fault, _Missing):
            raise fault
        # What a process says of itself comes before what the first one says of it.
        reasons = sorted((late, process, words) for process, (words, late) in enumerate(told) if words is not None)
        if reasons:
            raise OSError(f"process {reasons[0][1]}: {reasons[0][2]}") from fault

    async def _save(self, *args: Any, **named: Any) -> list[ocp.Future]:
        return [_Kept(self, await super()._save(*args, **named))]

    def _make_on_commit_callback(self, tmpdir: Any, *args: Any) -> Callable[[], None]:  # pyright: ignore
        """What the first process does when all have written. Orbax lets the others wait until it returns."""
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
    """Waits for the work of one process. Its failure is kept, and its part of the manifest withdrawn."""

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
