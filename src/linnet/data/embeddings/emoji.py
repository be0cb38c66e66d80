"""`emoji-pairs`: the caption and image of every emoji, embedded by the built-in encoder.

The embeddings are computed when the set is first opened, in a few seconds, and then read from the cache.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from linnet.config.schema import PairsConfig
from linnet.core.files import cache_folder
from linnet.data.embeddings.captions import ArrayCaptions
from linnet.data.embeddings.pairs import EmbeddingPairs, compute_fingerprint
from linnet.data.embeddings.vectors import ArrayShard, Vectors
from linnet.data.encoders.builtin import WEIGHTS, BuiltinEncoder, open_builtin
from linnet.data.encoders.network import SIZE
from linnet.data.index import sha256_file
from linnet.data.npy_writer import cached_array
from linnet.data.sources.emoji import FOLDER, open_emoji
from linnet.data.splits import SPLITS, check_unset

VERSION = 1
"""Version of the computation; part of the cache key."""
UNUSED_FIELDS = (
    "images",
    "texts",
    "metadata",
    "encodings",
    "image_key",
    "text_key",
    "split_key",
    "validation_fraction",
    "test_fraction",
)


def open_emoji_pairs(cfg: PairsConfig, seed: int, *, encodings: bool = False) -> EmbeddingPairs:
    check_unset(cfg, UNUSED_FIELDS, "is split by what its images show")
    images, captions, split_of = open_emoji(SIZE)
    # The key does not hash the vectors: another processor may round them differently although the data is the same.
    key_parts = [
        str(VERSION),
        *(sha256_file(path) for path in (WEIGHTS, FOLDER / f"{SIZE}.png", FOLDER / "captions.json")),
    ]
    key = hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()
    embeds = _load_embeds(key, images, captions)
    rows = {name: np.flatnonzero(np.array(split_of) == name) for name in SPLITS}
    vectors = {
        what: Vectors.concatenate([ArrayShard(Path(cfg.source), what, embeds[i])], what)
        for i, what in enumerate(("text", "image"))
    }
    return EmbeddingPairs(
        cfg=cfg,
        seed=seed,
        images=vectors["image"],
        texts=vectors["text"],
        encodings=_load_encodings(cfg, key, captions) if encodings else None,
        text_captions=ArrayCaptions((np.array(captions),)),
        rows=rows,
        origin={
            "source": cfg.source,
            "root": "embedded",
            "encoder": "builtin",
            "left_out": {},
            "held_out": "whole concepts, by a hash of their names",
        },
        fingerprint=compute_fingerprint(key_parts, rows),
    )


def _load_embeds(key: str, images: np.ndarray, captions: list[str]) -> Float32[np.ndarray, "2 n D"]:
    """Return text embeddings, then image embeddings."""

    def embed() -> Float32[np.ndarray, "2 n D"]:
        encoder = open_builtin()
        return np.stack([encoder.embed_texts(captions), encoder.embed_images(images)])

    return np.array(cached_array(cache_folder() / "pairs" / f"emoji-{key[:32]}.npy", embed))


def _load_encodings(cfg: PairsConfig, key: str, captions: list[str]) -> Vectors:
    """Return the token encodings of the captions in float16, memory-mapped from the cache: 93 MB."""
    shape = (len(captions), BuiltinEncoder.text_len, BuiltinEncoder.width)
    array = cached_array(
        cache_folder() / "pairs" / f"emoji-encodings-{key[:32]}.npy",
        lambda: open_builtin().encode_texts(captions).encodings.astype(np.float16),
        lambda array: array.shape == shape and array.dtype == np.float16,
    )
    return Vectors.concatenate([ArrayShard(Path(cfg.source), "encodings", array)], "text encodings")
