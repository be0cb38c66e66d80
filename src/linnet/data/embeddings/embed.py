"""Embed images and captions into pairs, in the folder layout of clip-retrieval, one shard at a time.

`embed.json` records the task and the finished blocks of the source. It is written after the files of a block are complete, so a
killed run resumes with the next block; a folder is complete when `finished` is set.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write
from linnet.data.embeddings.captioned_images import CaptionedImage, CaptionedSource
from linnet.data.embeddings.encodings import NO_ENCODINGS, CaptionShard, EncodingSettings, open_caption_shard
from linnet.data.embeddings.sources import FOLDERS
from linnet.data.encoders.encoder import Encoder
from linnet.data.images import BrokenImage
from linnet.data.npy_writer import write_array
from linnet.data.sources.files import format_left_out, reading

MANIFEST = "embed.json"
VERSION = 1
BATCH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedTask:
    source: CaptionedSource
    encoder: Encoder
    encodings: EncodingSettings = NO_ENCODINGS
    shard_rows: int = 8192
    """Samples of the source per block; unusable samples are missing from its shard."""

    def __post_init__(self) -> None:
        if self.shard_rows < 1:
            raise invalid("--shard-rows", self.shard_rows, "at least 1", "use 8192")

    def identity(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "encoder": self.encoder.name,
            "encoder_fingerprint": self.encoder.fingerprint,
            "shard_rows": self.shard_rows,
            **self.encodings.identity(),
            **self.source.identity,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedManifest:
    task: dict[str, Any]
    """`EmbedTask.identity()`; stored as `asked`."""
    blocks: tuple[int, ...] = ()
    """Pairs written for each finished block of the source."""
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    finished: bool = False

    @property
    def n_pairs(self) -> int:
        return sum(self.blocks)

    @property
    def n_shards(self) -> int:
        return sum(n > 0 for n in self.blocks)

    def save(self, out: Path) -> None:
        fields = dataclasses.asdict(self)
        atomic_write(out / MANIFEST, (json.dumps({"asked": fields.pop("task"), **fields}, indent=1) + "\n").encode())


def embed(task: EmbedTask, out: Path, progress: Callable[[int], None] = lambda n: None) -> EmbedManifest:
    """Embed a source into `out`. Resumes an earlier run of the same task; the folder of another task is an error."""
    manifest = start_or_resume(task.identity(), out)
    samples = task.source.samples()
    for number, block in enumerate(_blocks(samples, task.shard_rows)):
        if number < len(manifest.blocks):
            continue  # done by an earlier run
        with open_caption_shard(task.encoder, task.encodings, out, manifest.n_shards) as captions:
            pairs, left_out = _embed_block(
                task, captions, block, lambda n, before=number * task.shard_rows: progress(before + n)
            )
            if pairs is not None:
                captions.finish()
                _write(out, manifest.n_shards, pairs)
        manifest = dataclasses.replace(
            manifest,
            blocks=(*manifest.blocks, 0 if pairs is None else len(pairs.images)),
            left_out=dict(Counter(manifest.left_out) + left_out),
        )
        manifest.save(out)
    if not manifest.n_pairs:
        reasons = format_left_out(manifest.left_out) or "nothing there"
        raise invalid(
            "SOURCE",
            task.source.identity["source"],
            f"images with captions (left out: {reasons})",
            "give each image a caption",
        )
    manifest = dataclasses.replace(manifest, finished=True)
    manifest.save(out)
    return manifest


def read_manifest(folder: Path) -> EmbedManifest | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    with reading(path):
        text = path.read_text(errors="replace")
    try:
        fields = json.loads(text)
        return EmbedManifest(task=fields.pop("asked"), **{**fields, "blocks": tuple(fields["blocks"])})
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged. Fix: embed into a new folder with `linnet data embed`.") from None


def check_finished(folder: Path) -> None:
    manifest = read_manifest(folder)
    if manifest is not None and not manifest.finished:
        raise UserError(
            f"{folder} was not finished: {manifest.n_pairs:,} pairs are embedded so far. Fix: run the same `linnet data embed` again: "
            "it resumes where it stopped."
        )


def start_or_resume(task: dict[str, Any], out: Path) -> EmbedManifest:
    """Return the manifest of `out`, which must be a new folder or one of the same task."""
    manifest = read_manifest(out)
    if manifest is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise invalid(
                "--out", str(out), "a new folder, or one that an earlier run of this command started", "name another"
            )
        manifest = EmbedManifest(task=task)
        manifest.save(out)
        return manifest
    differs = sorted(name for name in task.keys() | manifest.task.keys() if task.get(name) != manifest.task.get(name))
    if differs:
        changes = ", ".join(f"{name} was {manifest.task.get(name)!r} and is {task.get(name)!r}" for name in differs)
        older = "text_encodings" in task and "text_encodings" not in manifest.task
        fix = "name a new folder" + (", or add --text-encodings none" if older else "")
        raise invalid("--out", str(out), f"a folder of the same task ({changes})", fix)
    return manifest


@dataclasses.dataclass(frozen=True)
class _EmbeddedBlock:
    images: Float32[np.ndarray, "n D"]
    texts: Float32[np.ndarray, "n T"]
    metadata: dict[str, list[str | None]]


def _embed_block(
    task: EmbedTask, shard: CaptionShard, block: Iterator[CaptionedImage], progress: Callable[[int], None]
) -> tuple[_EmbeddedBlock | None, Counter[str]]:
    """Embed one block. Holds one batch of images and the embeddings of the block in memory."""
    metadata: dict[str, list[str | None]] = {"image_path": [], "caption": []}
    metadata |= {"split": []} if task.source.has_splits else {}
    images: list[Float32[np.ndarray, "n D"]] = []
    texts: list[Float32[np.ndarray, "n T"]] = []
    left_out: Counter[str] = Counter()
    n_seen = 0
    while batch := list(itertools.islice(block, BATCH)):
        decoded: list[np.ndarray] = []
        captions: list[str] = []
        for sample in batch:
            if not sample.caption:
                left_out["no_caption"] += 1
                continue
            try:
                with reading(sample.name):
                    decoded.append(task.encoder.decode(sample.read_image()))
            except BrokenImage as error:
                left_out[error.reason] += 1
                continue
            captions.append(sample.caption)
            for column, value in (("image_path", sample.name), ("caption", sample.caption), ("split", sample.split)):
                if column in metadata:
                    metadata[column].append(value)
        if captions:
            images.append(task.encoder.embed_images(np.stack(decoded)))
            texts.append(shard.embed(captions))
        n_seen += len(batch)
        progress(n_seen)
    return (_EmbeddedBlock(np.concatenate(images), np.concatenate(texts), metadata) if images else None), left_out


def _write(out: Path, number: int, pairs: _EmbeddedBlock) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = io.BytesIO()
    pq.write_table(pa.table(pairs.metadata), table)
    atomic_write(out / FOLDERS["metadata"] / f"metadata_{number}.parquet", table.getbuffer())
    write_array(out / FOLDERS["text"] / f"text_emb_{number}.npy", pairs.texts)
    write_array(out / FOLDERS["image"] / f"img_emb_{number}.npy", pairs.images)


def _blocks(samples: Iterator[CaptionedImage], n: int) -> Iterator[Iterator[CaptionedImage]]:
    """Split the samples into blocks of n. Each block is exhausted, by the caller or here, before the next begins."""
    for first in samples:
        block = itertools.chain([first], itertools.islice(samples, n - 1))
        yield block
        collections.deque(block, maxlen=0)
