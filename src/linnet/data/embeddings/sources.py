"""Readers for each storage format of pairs: image and text embeddings, captions, and predefined splits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped

from linnet.config.schema import PairsConfig
from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.captions import ArrayCaptions, Captions, ParquetCaptions
from linnet.data.embeddings.shards import check_aligned, check_row_counts, find_gaps, find_shards, match_shards
from linnet.data.embeddings.unpack_cache import list_arrays, unpack_column, unpack_npz
from linnet.data.embeddings.vectors import ArrayShard, Vectors, open_npy
from linnet.data.embeddings.webdataset import TarCaptions, open_tar
from linnet.data.sources.archives import open_parquet
from linnet.data.sources.files import reading
from linnet.data.sources.npy import map_npy
from linnet.data.splits import SPLITS

STEMS = {"image": ("image", "img"), "text": ("text", "txt")}
ENDS = ("_embed", "_embedding", "_embeddings", "_emb", "_embeds", "_features")
KNOWN_NAMES = {what: tuple(stem + end for stem in stems for end in ENDS) for what, stems in STEMS.items()}
"""Column and array names that are recognised: image_embed, img_emb, ..."""
SPLIT_WORDS = {"train": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2}
FOLDERS = {"image": "img_emb", "text": "text_emb", "metadata": "metadata", "encodings": "text_encodings"}
"""Folder names of clip-retrieval; the last is Linnet's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    images: Vectors
    texts: Vectors
    encodings: Vectors | None = None
    captions: Captions | None = None
    split_of: Int64[np.ndarray, " n"] | None = None
    """An index of SPLITS for each row; -1 for a row that is not test."""
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    warnings: tuple[str, ...] = ()


def from_npy(
    cfg: PairsConfig, images: str, texts: str | None, metadata: str | None, encodings: str | None
) -> PairSource:
    """Open .npy shards; each image shard has a text shard and optionally a parquet file of metadata."""
    image_paths = find_shards(images, ".npy", "data.images")
    if texts is None:
        captions = f" ({metadata} has captions)" if metadata else ""
        command = f"linnet data embed {images} --metadata {metadata or 'PARQUET'} --out DIR"
        raise UserError(
            f"{images} has image embeddings, but there are no text embeddings{captions}. Fix: name them with --data.texts, or make "
            f"them from captions once with `{command}` and train on DIR."
        )
    text_paths = match_shards(image_paths, find_shards(texts, ".npy", "data.texts"), "text")
    image = Vectors.concatenate([open_npy(path, "image") for path in image_paths], "image")
    text = Vectors.concatenate([open_npy(path, "text") for path in text_paths], "text")
    check_aligned(image, text, "text")
    encoded = None
    if encodings is not None:
        paths = match_shards(image_paths, find_shards(encodings, ".npy", "data.encodings"), "text encodings")
        encoded = Vectors.concatenate([open_npy(path, "encodings", n_axes=3) for path in paths], "text encodings")
        check_aligned(image, encoded, "text encodings")
    captions, split_of, warnings = _read_metadata(cfg, image, image_paths, metadata)
    return PairSource(
        images=image,
        texts=text,
        encodings=encoded,
        captions=captions,
        split_of=split_of,
        warnings=(*find_gaps(image_paths), *warnings),
    )


def _read_metadata(
    cfg: PairsConfig, image: Vectors, image_paths: Sequence[Path], metadata: str | None
) -> tuple[Captions | None, Int64[np.ndarray, " n"] | None, list[str]]:
    """Return captions, splits and warnings."""
    if metadata is None:
        if cfg.split_key is not None:
            raise invalid("data.split_key", cfg.split_key, "omitted for a source without metadata", "leave it out")
        return None, None, []
    paths = match_shards(image_paths, find_shards(metadata, ".parquet", "data.metadata"), "metadata")
    uncaptioned = None
    for shard, path in zip(image.shards, paths, strict=True):
        with reading(path), open_parquet(path) as parquet:
            check_row_counts(shard.path, shard.n_rows, path, parquet.metadata.num_rows, "metadata")
            uncaptioned = uncaptioned or (path if cfg.caption_key not in parquet.schema_arrow.names else None)
    split_of = _read_splits(paths, cfg.split_key)
    if uncaptioned is not None:
        # Training needs no captions; they are only displayed.
        return None, split_of, [f"{uncaptioned} has no column {cfg.caption_key!r}: no captions can be shown."]
    return ParquetCaptions(paths, cfg.caption_key), split_of, []


def from_parquet(cfg: PairsConfig, paths: Sequence[Path]) -> PairSource:
    """Open columns of embeddings, which are unpacked once into the cache."""
    shards: dict[str, list[ArrayShard]] = {"image": [], "text": []}
    has_captions = True
    for path in paths:
        with reading(path), open_parquet(path) as parquet:
            names, n_rows = parquet.schema_arrow.names, parquet.metadata.num_rows
        has_captions = has_captions and cfg.caption_key in names
        for what, key in (("image", cfg.image_key), ("text", cfg.text_key)):
            column = _find_name(names, key, what, path)
            unpacked, array = unpack_column(path, column, n_rows)
            shards[what].append(ArrayShard(unpacked, what, array, f"{path}, column {column}"))
    return PairSource(
        images=Vectors.concatenate(shards["image"], "image"),
        texts=Vectors.concatenate(shards["text"], "text"),
        captions=ParquetCaptions(paths, cfg.caption_key) if has_captions else None,
        split_of=_read_splits(paths, cfg.split_key),
        warnings=tuple(find_gaps(paths)),
    )


def from_npz(cfg: PairsConfig, path: Path, *, encodings: bool = False) -> PairSource:
    names = list_arrays(path)
    shards: dict[str, Vectors] = {}
    for what, key in (("image", cfg.image_key), ("text", cfg.text_key)):
        array = _find_name(names, key, what, path)
        unpacked, _ = unpack_npz(path, array, cfg.max_unpacked_gb)
        shard = dataclasses.replace(open_npy(unpacked, what), display_name=f"{path}, {array}")
        shards[what] = Vectors.concatenate([shard], what)
    n = shards["image"].n_rows
    check_row_counts(path, n, path, shards["text"].n_rows, "text")
    encoded = None
    if encodings and FOLDERS["encodings"] in names:
        shard = open_npy(unpack_npz(path, FOLDERS["encodings"])[0], "encodings", n_axes=3)
        encoded = Vectors.concatenate(
            [dataclasses.replace(shard, display_name=f"{path}, {FOLDERS['encodings']}")], "text encodings"
        )
        check_row_counts(path, n, path, encoded.n_rows, "text encodings")
    captions = None
    if cfg.caption_key in names:
        captions = map_npy(unpack_npz(path, cfg.caption_key, cfg.max_unpacked_gb)[0])
        check_row_counts(path, n, path, len(captions), "caption")
    split_of = None
    if cfg.split_key is not None:
        if cfg.split_key not in names:
            raise invalid(
                "data.split_key", cfg.split_key, f"an array of {path} ({', '.join(names)})", "name one of them"
            )
        split_of = parse_splits(
            np.asarray(map_npy(unpack_npz(path, cfg.split_key, cfg.max_unpacked_gb)[0])), str(path), cfg.split_key
        )
        check_row_counts(path, n, path, len(split_of), "split")
    return PairSource(
        images=shards["image"],
        texts=shards["text"],
        encodings=encoded,
        captions=None if captions is None else ArrayCaptions((captions,)),
        split_of=split_of,
    )


def from_tars(cfg: PairsConfig, paths: Sequence[Path]) -> PairSource:
    if cfg.split_key is not None:
        raise invalid("data.split_key", cfg.split_key, "omitted for webdataset tars", "leave it out")
    endings = {
        what: (key.lower().removeprefix("."),)
        if key
        else tuple(f"{name}.npy" for name in (*KNOWN_NAMES[what], *STEMS[what]))
        for what, key in (("image", cfg.image_key), ("text", cfg.text_key))
    }
    tars = [open_tar(path, endings["image"], endings["text"]) for path in paths]
    has_captions = any((tar.captions[:, 1] > 0).any() for tar in tars)
    spans = tuple(tar.captions for tar in tars)
    return PairSource(
        images=Vectors.concatenate([tar.image for tar in tars], "image"),
        texts=Vectors.concatenate([tar.text for tar in tars], "text"),
        captions=TarCaptions(tuple(tar.image for tar in tars), spans, cfg.caption_key) if has_captions else None,
        left_out=sum((tar.left_out for tar in tars), Counter[str]()),
        warnings=(*find_gaps(paths), *(warning for tar in tars for warning in tar.warnings)),
    )


def _find_name(names: Sequence[str], key: str | None, what: str, path: Path) -> str:
    matches = [name for name in names if name == key or (key is None and name.lower() in KNOWN_NAMES[what])]
    if len(matches) == 1:
        return matches[0]
    count = len(matches) or "no"
    raise invalid(
        f"data.{what}_key",
        key,
        f"the name of the {what} embeddings in {path} ({count} known name among {', '.join(names) or 'nothing'})",
        f"name it with --data.{what}-key; captions without embeddings are embedded by `linnet data embed`",
    )


def _read_splits(paths: Sequence[Path], key: str | None) -> Int64[np.ndarray, " n"] | None:
    if key is None:
        return None
    parts: list[Int64[np.ndarray, " n"]] = []
    for path in paths:
        with reading(path), open_parquet(path) as parquet:
            names = parquet.schema_arrow.names
            if key not in names:
                raise invalid("data.split_key", key, f"a column of {path} ({', '.join(names)})", "name one of them")
            values = parquet.read(columns=[key]).column(0).to_pylist()
        parts.append(parse_splits(np.array(values), str(path), key))
    return np.concatenate(parts)


def parse_splits(values: Shaped[np.ndarray, " n"], where: str, key: str) -> Int64[np.ndarray, " n"]:
    if values.dtype.kind in "bui" and np.isin(values, (0, 1)).all():
        return np.where(values.astype(bool), SPLITS.index("test"), -1)
    numbers = [SPLIT_WORDS.get(str(value).lower()) for value in values.tolist()]
    if None in numbers:
        row = numbers.index(None)
        raise invalid(
            f"{key} in row {row} of {where}",
            values.tolist()[row],
            f"true or false, or one of {', '.join(SPLIT_WORDS)}",
            "correct it",
        )
    return np.array(numbers, np.int64)
