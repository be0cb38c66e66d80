"""Detect the format of a source of pairs, validate every row, and split it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from linnet.config.schema import EMOJI_PAIRS, PairsConfig
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.data.embeddings import emoji, sources
from linnet.data.embeddings.embed import check_finished
from linnet.data.embeddings.neighbors import NeighborIndex
from linnet.data.embeddings.pairs import EmbeddingPairs, compute_fingerprint, split_rows
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.embeddings.shards import natural_key
from linnet.data.embeddings.sources import FOLDERS, PairSource
from linnet.data.embeddings.validation import validate_rows
from linnet.data.sources.files import leaves_root, match_files
from linnet.data.sources.images import COMPRESSED_TARS
from linnet.data.sources.locations import resolve_paths

UNIT_NORMS = (0.9, 1.1)
"""Range of mean norms that count as normalised."""


def open_pairs(cfg: PairsConfig, seed: int, *, encodings: bool = False) -> EmbeddingPairs:
    """Open and validate the pairs of a run; raises a `UserError` for unusable data.

    `encodings`: also open the token encodings, if there are any. They are many times larger than the rest, so the default is not
    to.
    """
    if cfg.mix and encodings:
        raise invalid(
            "data.mix", cfg.mix, "0 with model.text_encodings: mixup cannot be applied to token encodings", "use 0"
        )
    cfg = resolve_paths(cfg)
    if cfg.source == EMOJI_PAIRS and cfg.images is None:
        return emoji.open_emoji_pairs(cfg, seed, encodings=encodings)
    source = find_source(cfg, encodings=encodings)
    if source.encodings is not None and source.encodings.width != source.texts.width:
        where = f"the width of the token encodings in {source.encodings.shards[0].path}"
        needs = f"{source.texts.width}, as wide as the text embeddings"
        raise invalid(where, source.encodings.width, needs, "embed the captions again with `linnet data embed`")
    kinds = {"image": source.images, "text": source.texts, "text encodings": source.encodings}
    results = {
        what: validate_rows(vectors, what, padded=what == "text encodings")
        for what, vectors in kinds.items()
        if vectors is not None
    }
    bad = np.unique(np.concatenate([result.bad_rows for result in results.values()]))
    kept = np.setdiff1d(np.arange(source.images.n_rows), bad, assume_unique=True)
    warnings = [*source.warnings, *(warning for result in results.values() for warning in result.warnings)]
    for what in ("image", "text"):
        if len(kept) and not UNIT_NORMS[0] <= results[what].mean_length <= UNIT_NORMS[1]:
            warnings.append(
                f"The {what} embeddings have a mean norm of {results[what].mean_length:.3g}; the prior expects vectors of norm "
                "1, as CLIP encoders give after normalization."
            )
    rows, method = split_rows(cfg, kept, source.split_of)
    if not len(rows["train"]):
        raise UserError(
            f"no pair of {_source_name(cfg)} is left to train on ({len(bad):,} of {source.images.n_rows:,} were left out"
            + (f": {warnings[0]}" if warnings else "")
            + "). Fix: name a source with valid rows, or hold out fewer."
        )
    left_out = dict(source.left_out)
    for result in results.values():
        left_out |= result.left_out
    return EmbeddingPairs(
        cfg=cfg,
        seed=seed,
        images=source.images,
        texts=source.texts,
        encodings=source.encodings,
        text_captions=source.captions,
        rows=rows,
        origin={
            "source": _source_name(cfg),
            "root": _source_name(cfg),
            "encoder": find_encoder(cfg),
            "left_out": {"source": left_out},
            "held_out": method,
        },
        fingerprint=compute_fingerprint([result.sha256 for result in results.values()], rows),
        source_warnings=tuple(warnings),
    )


def open_neighbor_index(cfg: PairsConfig, seed: int, width: int) -> NeighborIndex:
    """Return an index of the image embeddings for predictions of this width."""
    pairs = open_pairs(cfg, seed)
    if pairs.image_width != width:
        needs = f"a dataset whose image embeddings have the prior's width, {width}; these have {pairs.image_width}"
        raise invalid("data.source", cfg.images or cfg.source, needs, "restore the data that the run was trained on")
    return NeighborIndex(pairs)


def find_source(cfg: PairsConfig, *, encodings: bool = False) -> PairSource:
    for field in ("images", "texts", "metadata", "encodings") if cfg.images is not None else ("source",):
        if getattr(cfg, field) is not None:
            check_local(f"data.{field}", getattr(cfg, field))
    if cfg.images is not None:
        encodings_path = _find_encodings(cfg) if encodings else None
        return sources.from_npy(cfg, cfg.images, cfg.texts, cfg.metadata, encodings_path)
    path = os.path.expanduser(cfg.source)
    root = Path(path)
    if (root / FOLDERS["image"]).is_dir():
        check_finished(root)
        outside = next((n for n in FOLDERS.values() if (root / n).is_dir() and leaves_root(root / n, root)), None)
        if outside is not None:
            raise UserError(
                f"{root / outside} is a symbolic link that leaves {root}, and such links are not followed. Fix: name the folders with "
                "--data.images, --data.texts and --data.metadata."
            )
        folders = {what: str(root / name) if (root / name).is_dir() else None for what, name in FOLDERS.items()}
        encodings_path = folders["encodings"] if encodings else None
        return sources.from_npy(cfg, str(folders["image"]), folders["text"], folders["metadata"], encodings_path)
    if path.lower().endswith(COMPRESSED_TARS):
        raise invalid("data.source", cfg.source, "an uncompressed tar, for random access", "decompress it")
    matched = match_files(path)
    if matched is None:
        needs = f"an existing file, folder or glob, or {EMOJI_PAIRS!r}"
        raise invalid("data.source", cfg.source, needs, "correct the path")
    by_kind = {kind: sorted((p for p in matched.paths if p.suffix.lower() == kind), key=natural_key) for kind in KINDS}
    present = [kind for kind, paths in by_kind.items() if paths]
    if present == [".parquet"]:
        return sources.from_parquet(cfg, by_kind[".parquet"])
    if present == [".tar"]:
        return sources.from_tars(cfg, by_kind[".tar"])
    if present == [".npz"] and len(by_kind[".npz"]) == 1:
        return sources.from_npz(cfg, by_kind[".npz"][0], encodings=encodings)
    if ".npy" in present:
        raise invalid(
            "data.source",
            cfg.source,
            f"a folder with {FOLDERS['image']}/ and {FOLDERS['text']}/ where pairs are .npy files",
            "name both with --data.images and --data.texts",
        )
    raise invalid(
        "data.source",
        cfg.source,
        "embeddings of one kind: img_emb/ and text_emb/ with .npy, .parquet, webdataset .tar, or one .npz "
        + (f"(it has {', '.join(present)})" if present else "(it has none of these)"),
        "name one kind; to make pairs from images with captions, run `linnet data embed SOURCE --out DIR`",
    )


def _find_encodings(cfg: PairsConfig) -> str | None:
    """Return the path of the token encodings when images and texts are given separately: by default beside the texts."""
    if cfg.encodings is not None or cfg.texts is None:
        return cfg.encodings
    texts = Path(os.path.expanduser(cfg.texts))
    beside = texts.parent / FOLDERS["encodings"]
    return str(beside) if texts.name == FOLDERS["text"] and beside.is_dir() else None


KINDS = (".npy", ".parquet", ".tar", ".npz")


def _source_name(cfg: PairsConfig) -> str:
    return cfg.images or cfg.source
