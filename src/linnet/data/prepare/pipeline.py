"""`linnet data prepare`: convert a source of any size to shards and an index, in parallel, in bounded memory, and resumable.

The parent reads and splits, workers encode. Each finished shard leaves a manifest in `.unfinished`; a restart reads the source
again, which is cheap, and skips the chunks that have a manifest.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write
from linnet.core.special_tokens import FIRST_BYTE
from linnet.data import index as indexes
from linnet.data.index import Index, TokenShard
from linnet.data.prepare.chunks import Chunk, SplitFractions, image_chunks, text_chunks
from linnet.data.prepare.shards import PixelEncoder, ShardManifest, TextEncoder, read_manifest, write_shard
from linnet.data.prepare.splits import ShardStream, build_splits
from linnet.data.sources.documents import Documents
from linnet.data.sources.files import format_left_out
from linnet.data.sources.images import ImageSource
from linnet.tokenizers.base import Tokenizer

UNFINISHED = ".unfinished"
POOL_FROM_BYTES = 64 << 20
"""Smaller inputs are processed in this process: starting workers would take longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """All settings that determine the output."""

    source: Documents | ImageSource
    tokenizer: Tokenizer
    fractions: SplitFractions
    size: int | None
    """Image height and width in pixels; None for documents."""
    max_broken: float
    """Maximum fraction of broken images that is tolerated."""

    def identity(self) -> dict[str, Any]:
        """Return the identity of the task; attempts may share a folder only if it is equal.

        `max_broken` is not part of it, because it does not affect the output.
        """
        return {
            "version": indexes.VERSION,
            "source": self.source.identity(),
            "tokenizer": self.tokenizer.fingerprint,
            "shares": dataclasses.asdict(self.fractions),
            "size": self.size,
        }

    def encoder(self) -> TextEncoder | PixelEncoder:
        return TextEncoder(self.tokenizer) if self.size is None else PixelEncoder(self.size)

    def chunks(self) -> Iterator[tuple[Chunk, int]]:
        if self.size is None:
            return text_chunks(cast(Documents, self.source), self.fractions)
        return image_chunks(cast(ImageSource, self.source), self.fractions)

    @property
    def ends_with_eos(self) -> bool:
        """Whether an EOS id follows each document; images have none, because their size is fixed."""
        return self.size is None and cast(Documents, self.source).ends_with_eos


def prepare(
    task: PrepareConfig,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda position: None,
) -> Index:
    """Prepare `out`, or resume an earlier attempt; repeating a finished task changes nothing."""
    identity = json.loads(json.dumps(task.identity()))
    if finished := _load_finished(out, identity):
        return finished
    manifests = out / UNFINISHED
    _start_or_resume(out, manifests, identity)
    encoder = task.encoder()
    streams: dict[str, list[tuple[str, ShardManifest]]] = {}
    predefined = False
    with contextlib.closing(_encode_chunks(task, encoder, out, manifests, workers, progress)) as encoded:
        for chunk, manifest in encoded:
            streams.setdefault(chunk.stream, []).append((chunk.name, manifest))
            predefined = predefined or chunk.predefined
    index = _build_index(task, encoder, streams, predefined, out, manifests)
    _check_not_empty(index, streams)
    task.tokenizer.save(out)
    atomic_write(out / "plan.json", json.dumps(identity, indent=1).encode() + b"\n")
    index.save(out)
    shutil.rmtree(manifests)
    return index


def is_unfinished(folder: Path) -> bool:
    try:
        return (folder / UNFINISHED).exists()
    except (OSError, ValueError):
        return False


def _load_finished(out: Path, identity: dict[str, Any]) -> Index | None:
    if not indexes.is_prepared(out):
        return None
    with contextlib.suppress(OSError, ValueError):
        if json.loads((out / "plan.json").read_text()) == identity:
            index = indexes.load(out)
            indexes.check_files(out, index)
            return index
    raise invalid(
        "--out", str(out), "a folder without other prepared data", "choose another folder, or remove this one first"
    )


def _start_or_resume(out: Path, manifests: Path, identity: dict[str, Any]) -> None:
    recorded = manifests / "plan.json"
    if recorded.exists():
        with contextlib.suppress(ValueError):
            if json.loads(recorded.read_text()) == identity:
                return
        raise UserError(
            f"--out {out} contains an unfinished preparation of another task: the source, its files or the options changed. "
            f"Fix: remove {manifests}, or choose another folder."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise invalid("--out", str(out), "a new or empty folder", "choose another one")
    try:
        manifests.mkdir(parents=True)
    except OSError as error:
        raise invalid(
            "--out", str(out), f"a folder that can be made ({error.strerror})", "choose another one"
        ) from None
    atomic_write(recorded, json.dumps(identity).encode())


def _encode_chunks(
    task: PrepareConfig,
    encoder: TextEncoder | PixelEncoder,
    out: Path,
    manifests: Path,
    workers: int | None,
    progress: Callable[[int], None],
) -> Generator[tuple[Chunk, ShardManifest], None, None]:
    """Yield all chunks (emptied) with their manifests, in order. Only a few chunks are in memory at a time."""
    n_workers = len(os.sched_getaffinity(0)) if workers is None else workers
    small = task.source.n_bytes is not None and task.source.n_bytes < POOL_FROM_BYTES
    with contextlib.ExitStack() as stack:
        pool = None
        if n_workers > 1 and not (small and workers is None):
            # Spawned, because forking a multi-threaded process, as ours is, may hang.
            context = multiprocessing.get_context("spawn")
            pool = concurrent.futures.ProcessPoolExecutor(n_workers, mp_context=context)
            stack.callback(pool.shutdown, cancel_futures=True)
        waiting: list[tuple[Chunk, int, Callable[[], ShardManifest]]] = []

        def next_result() -> tuple[Chunk, ShardManifest]:
            chunk, position, result = waiting.pop(0)
            try:
                manifest = result()
            except concurrent.futures.process.BrokenProcessPool:
                raise UserError(
                    "a worker process died, possibly out of memory. Finished work is kept. Fix: run the same command again, "
                    "with fewer --workers."
                ) from None
            progress(position)
            return chunk, manifest

        for chunk, position in task.chunks():
            existing = read_manifest(chunk.name, out, manifests)
            if existing is not None:
                waiting.append((_without_items(chunk), position, lambda manifest=existing: manifest))
            elif pool is None:
                manifest = write_shard(chunk, encoder, out, manifests)
                waiting.append((_without_items(chunk), position, lambda manifest=manifest: manifest))
            else:
                future = pool.submit(write_shard, chunk, encoder, out, manifests)
                waiting.append((_without_items(chunk), position, future.result))
            while len(waiting) > 2 * n_workers:
                yield next_result()
        while waiting:
            yield next_result()


def _without_items(chunk: Chunk) -> Chunk:
    return dataclasses.replace(chunk, items=[])


def _build_index(
    task: PrepareConfig,
    encoder: TextEncoder | PixelEncoder,
    streams: dict[str, list[tuple[str, ShardManifest]]],
    predefined: bool,
    out: Path,
    manifests: Path,
) -> Index:
    all_manifests = [manifest for shards in streams.values() for _, manifest in shards]
    broken: Counter[str] = sum((Counter(manifest.broken) for manifest in all_manifests), Counter[str]())
    shards, by_split = [], {}
    for name, members in streams.items():
        numbers = range(len(shards), len(shards) + len(members))
        shards += [TokenShard(file=a.shard, tokens=a.tokens, sha256=a.sha256) for _, a in members]
        by_split[name] = ShardStream.read(members, list(numbers), manifests, task.ends_with_eos)
    _check_broken(task, broken, all_manifests, sum(stream.n_documents for stream in by_split.values()))
    is_pixels = isinstance(encoder, PixelEncoder)
    is_bytes = encoder.dtype == "uint8"
    shape = [encoder.size, encoder.size, 3] if isinstance(encoder, PixelEncoder) else None
    splits, held_out = build_splits(
        by_split,
        task.fractions,
        out,
        shards,
        encoder.dtype,
        None if is_bytes else task.tokenizer,
        count_words=not is_pixels,
        predefined=predefined,
        unit=math.prod(shape or [1]),
    )
    return Index(
        kind="pixels" if is_pixels else "text",
        dtype=encoder.dtype,
        first_id=FIRST_BYTE if is_bytes else 0,
        shape=shape,
        tokenizer={
            "kind": task.tokenizer.kind,
            "n_vocab": task.tokenizer.n_vocab,
            "end_id": task.tokenizer.eos_id,
            "fingerprint": task.tokenizer.fingerprint,
        },
        source=task.source.identity(),
        shards=shards,
        splits=splits,
        held_out=held_out,
        left_out=dict(task.source.left_out + broken),
        lossy_documents=sum(manifest.lossy for manifest in all_manifests),
    )


def _check_broken(task: PrepareConfig, broken: Counter[str], manifests: list[ShardManifest], n_valid: int) -> None:
    n = broken.total()
    if n <= task.max_broken * (n + n_valid):
        return
    first = next(manifest.broken_first for manifest in manifests if manifest.broken_first)
    raise UserError(
        f"{n} of {n + n_valid} images are broken, more than --max-broken {task.max_broken:g} allows. The first: {first}. "
        f"Fix: repair or remove them, or rerun with --max-broken {min(1.0, n / (n + n_valid) + 0.005):.2f} (finished work is kept)."
    )


def _check_not_empty(index: Index, streams: dict[str, Any]) -> None:
    if streams and index.splits["train"].tokens:
        return
    reasons = format_left_out(index.left_out)
    raise UserError(
        f"the source leaves nothing to train on{f' (left out: {reasons})' if reasons else ''}. Fix: name a larger source."
    )
