"""Add text embeddings to image embeddings that came with captions.

The user's image shards and metadata are copied into the new folder, so that it is self-contained.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.captions import ParquetCaptions
from linnet.data.embeddings.embed import BATCH, VERSION, EmbedManifest, start_or_resume
from linnet.data.embeddings.encodings import NO_ENCODINGS, EncodingSettings, open_caption_shard
from linnet.data.embeddings.shards import check_row_counts, find_shards, match_shards
from linnet.data.embeddings.sources import FOLDERS
from linnet.data.embeddings.vectors import open_npy
from linnet.data.encoders.encoder import Encoder
from linnet.data.npy_writer import write_array
from linnet.data.sources.files import reading


def find_image_embeds(root: Path) -> tuple[str, str] | None:
    """Return the paths of the image embeddings and the metadata if `root` has clip-retrieval's layout, else None."""
    images, metadata = root / FOLDERS["image"], root / FOLDERS["metadata"]
    return (str(images), str(metadata)) if images.is_dir() and metadata.is_dir() else None


def embed_texts(
    images_at: str,
    metadata_at: str,
    encoder: Encoder,
    out: Path,
    caption_key: str = "caption",
    encodings: EncodingSettings = NO_ENCODINGS,
    progress: Callable[[int], None] = lambda n: None,
) -> EmbedManifest:
    """Embed the captions of each image shard. Resumes where an earlier run stopped."""
    images = find_shards(images_at, ".npy", "SOURCE")
    metadata = match_shards(images, find_shards(metadata_at, ".parquet", "--metadata"), "metadata")
    sizes = [open_npy(path, "image").n_rows for path in images]
    captions = [ParquetCaptions([path], caption_key) for path in metadata]
    for image, size, path, texts in zip(images, sizes, metadata, captions, strict=True):
        check_row_counts(image, size, path, texts.sizes[0], "caption")
    if any(out.resolve() in path.resolve().parents for path in (*images, *metadata)):
        raise invalid("--out", str(out), "a folder other than SOURCE, which is not modified", "name a new folder")
    identity = _identity(images_at, encoder, caption_key, [*images, *metadata])
    manifest = start_or_resume(identity | encodings.identity(), out)
    for i in range(len(manifest.blocks), len(images)):
        rows = np.arange(sizes[i])
        with open_caption_shard(encoder, encodings, out, i) as shard:
            blocks = [shard.embed(captions[i].read(rows[at : at + BATCH])) for at in range(0, max(1, sizes[i]), BATCH)]
            shard.finish()
        _copy(metadata[i], out / FOLDERS["metadata"] / f"metadata_{i}.parquet")
        write_array(out / FOLDERS["text"] / f"text_emb_{i}.npy", np.concatenate(blocks))
        _copy(images[i], out / FOLDERS["image"] / f"img_emb_{i}.npy")
        manifest = dataclasses.replace(manifest, blocks=(*manifest.blocks, sizes[i]))
        manifest.save(out)
        progress(manifest.n_pairs)
    manifest = dataclasses.replace(manifest, finished=True)
    manifest.save(out)
    return manifest


def _identity(source: str, encoder: Encoder, caption_key: str, paths: list[Path]) -> dict[str, Any]:
    files = []
    for path in paths:
        with reading(path):
            info = path.stat()
        files.append([path.name, info.st_size, info.st_mtime_ns])
    return {
        "version": VERSION,
        "encoder": encoder.name,
        "encoder_fingerprint": encoder.fingerprint,
        "source": source,
        "caption_key": caption_key,
        "files": files,
    }


def _copy(path: Path, to: Path) -> None:
    """Copy a file atomically: it gets its final name at the end."""
    part = to.with_name(f".{to.name}.part")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, part)
        part.replace(to)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be copied to {to} ({error.strerror}). Fix: choose a folder with free space."
        ) from None
