"""Image embeddings that condition a pixel model: computed once by the built-in encoder, or supplied by the user.

Letters: n images, E embedding width.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError, invalid
from linnet.core.files import cache_folder
from linnet.core.local_path import check_local
from linnet.data.batch import Split
from linnet.data.index import sha256_file
from linnet.data.npy_writer import cached_array
from linnet.data.sources.npy import as_float32, map_npy
from linnet.data.splits import SPLITS

BUILTIN = "builtin"
VERSION = 1
"""Version of the embedding computation; part of the cache key."""
BLOCK = 1024
"""Images embedded per block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    embeds: Mapping[str, Float32[np.ndarray, "n E"]]
    """Unit-norm embeddings of each split, in the order of the split."""
    fingerprint: str

    @property
    def width(self) -> int:
        return next(iter(self.embeds.values())).shape[1]


def load_emoji_condition(source: str, split_of: Sequence[str]) -> Condition:
    """Return the embeddings of the emoji.

    With the built-in encoder these are the image embeddings of `emoji-pairs` for every image size, so that a prior trained on those
    can condition the model. A file has its rows in the order of the emoji.
    """
    if source == BUILTIN:
        from linnet.config.schema import EMOJI_PAIRS, PairsConfig
        from linnet.data.embeddings.emoji import open_emoji_pairs

        pairs = open_emoji_pairs(PairsConfig(source=EMOJI_PAIRS), 0)
        rows, fingerprint = pairs.images.read(np.arange(len(split_of))), pairs.fingerprint
    else:
        rows, fingerprint = _read_embeds(source, len(split_of))
    splits = np.array(split_of)
    return Condition(embeds={name: rows[splits == name] for name in SPLITS}, fingerprint=fingerprint)


def load_image_condition(source: str, splits: Mapping[str, Split], shape: tuple[int, int, int]) -> Condition:
    """Return the embeddings of image splits. A file has the rows of the training images first, then validation, then test."""
    counts = [splits[name].n_documents for name in SPLITS]
    if source == BUILTIN:
        rows, fingerprint = _compute_embeds(splits, shape)
    else:
        rows, fingerprint = _read_embeds(source, sum(counts))
    groups = np.split(rows, np.cumsum(counts)[:-1])
    return Condition(embeds=dict(zip(SPLITS, groups, strict=True)), fingerprint=fingerprint)


def check_no_condition(cfg: DataConfig) -> None:
    if cfg.condition is not None:
        raise invalid("data.condition", cfg.condition, f"none: {cfg.source} is text, not images", "leave it out")


def _compute_embeds(splits: Mapping[str, Split], shape: tuple[int, int, int]) -> tuple[Float32[np.ndarray, "n E"], str]:
    from linnet.data.encoders.builtin import WEIGHTS, open_builtin
    from linnet.data.encoders.network import SIZE

    # The key does not hash the vectors: another processor may round them differently although the data is the same.
    key_parts = [str(VERSION), sha256_file(WEIGHTS), *(splits[name].fingerprint() for name in SPLITS)]
    key = hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()

    def embed() -> Float32[np.ndarray, "n E"]:
        encoder, size, blocks = open_builtin(), int(np.prod(shape)), []
        for name in SPLITS:
            for at in range(0, splits[name].n_documents, BLOCK):
                stop = min(at + BLOCK, splits[name].n_documents)
                images = splits[name].content(at * size, stop * size).reshape(stop - at, *shape)
                blocks.append(encoder.embed_images(_resize(images, SIZE)))
        return np.concatenate(blocks)

    return np.array(cached_array(cache_folder() / "condition" / f"{key[:32]}.npy", embed)), key


def _resize(images: UInt8[np.ndarray, "n h w 3"], size: int) -> UInt8[np.ndarray, "n size size 3"]:
    from PIL import Image

    if images.shape[1] == size:
        return images
    resized = [Image.fromarray(image).resize((size, size), Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image) for image in resized])


def _read_embeds(source: str, n_images: int) -> tuple[Float32[np.ndarray, "n E"], str]:
    check_local("data.condition", source)
    path = Path(os.path.expanduser(source))
    try:
        rows = map_npy(path)
    except UserError as error:
        needs = f"builtin, or an .npy of numbers that can be read ({error})"
        raise invalid("data.condition", source, needs, "use builtin, or correct the path") from None
    if rows.ndim != 2 or len(rows) != n_images or not np.issubdtype(rows.dtype, np.floating):
        got = f"{source}, {rows.dtype} of shape {rows.shape}"
        raise invalid("data.condition", got, f"a row of numbers for each of {n_images} images", "embed them again")
    rows = as_float32(rows, source)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if bad.size:
        needs = "rows of finite numbers that are not all zero"
        raise invalid("data.condition", f"{source}, row {bad[0]} ({bad.size} in total)", needs, "embed them again")
    return rows / norms, sha256_file(path)
