"""Detect what `data.source` names and open it: prepared data, the built-in images, or plain text files."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from linnet.config.schema import EMBEDDED_CORPUS, DataConfig
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local
from linnet.data import index as indexes
from linnet.data.conditioning import check_no_condition, load_emoji_condition, load_image_condition
from linnet.data.dataset import TokenDataset
from linnet.data.packed import PackedSplit
from linnet.data.prepare.pipeline import is_unfinished
from linnet.data.sources.catalog import BENCHMARKS
from linnet.data.sources.emoji import SIZES, open_emoji
from linnet.data.sources.files import find_files
from linnet.data.sources.images import contains_images
from linnet.data.sources.locations import resolve_paths
from linnet.data.sources.text import open_text
from linnet.data.splits import SPLITS, check_unset, make_splits
from linnet.tokenizers.base import BytesTokenizer

EMOJI = {f"emoji-{size}": size for size in SIZES}
_SPLIT_FIELDS = ("validation_files", "test_files", "validation_fraction", "test_fraction")


def load_dataset(cfg: DataConfig, seed: int) -> TokenDataset:
    """Open the data of a run; raises a `UserError` for unusable data."""
    check_local("data.source", cfg.source)
    cfg = resolve_paths(cfg)
    path = Path(os.path.expanduser(cfg.source))
    if cfg.source in EMOJI:
        return _load_emoji(cfg, seed, EMOJI[cfg.source])
    if indexes.is_prepared(path):
        return _load_prepared(cfg, seed, path)
    if is_unfinished(path):
        raise UserError(
            f"data.source is {cfg.source!r}, whose preparation was not finished. Fix: run the same `linnet data prepare` again: "
            "it resumes where it stopped."
        )
    if cfg.source in BENCHMARKS and not path.exists():
        raise UserError(
            f"data.source is {cfg.source!r}, which is not prepared here. Fix: run `linnet data prepare {cfg.source} --out "
            f"{cfg.source}` (it says which file to download if it cannot), or name the folder it was prepared in with --data.source."
        )
    return _load_text(cfg, seed)


def has_splits(source: str) -> bool:
    """Return whether the source has predefined splits."""
    return source in EMOJI or indexes.is_prepared(Path(os.path.expanduser(source)))


def _load_text(cfg: DataConfig, seed: int) -> TokenDataset:
    if cfg.source != EMBEDDED_CORPUS and contains_images(cfg.source):
        raise UserError(
            f"data.source is {cfg.source!r}, which contains images or is a tar: prepare it first. Fix: run `linnet data prepare "
            f"{cfg.source} --out DIR` and train with --data.source DIR (it prints the complete command)."
        )
    source = find_files(cfg.source)
    plan = make_splits(source, cfg)
    splits = {name: open_text(plan.spans[name], cfg.sequence_len) for name in SPLITS}
    if not splits["train"].n_tokens:
        raise invalid(
            "data.source", cfg.source, "large enough to leave a fraction for training", "name a larger source"
        )
    check_no_condition(cfg)
    origin = {"source": cfg.source, "root": str(source.root), "left_out": plan.left_out, "held_out": plan.held_out}
    return TokenDataset(
        cfg=cfg, seed=seed, tokenizer=BytesTokenizer(), shape=None, origin=origin, condition=None, **splits
    )


def _load_prepared(cfg: DataConfig, seed: int, folder: Path) -> TokenDataset:
    check_unset(cfg, _SPLIT_FIELDS, "was split when it was prepared")
    index = indexes.load(folder)
    indexes.check_files(folder, index)
    shape = None if index.shape is None else (index.shape[0], index.shape[1], index.shape[2])
    _check_image_len(cfg, shape)
    splits = {name: indexes.open_split(folder, index, name, cfg.sequence_len) for name in SPLITS}
    held_out = dict.fromkeys(("validation", "test"), index.held_out)
    origin = {"source": cfg.source, "root": str(folder), "left_out": {"source": index.left_out}, "held_out": held_out}
    condition = None
    if shape is None:
        check_no_condition(cfg)
    elif cfg.condition is not None:
        condition = load_image_condition(cfg.condition, splits, shape)
    return TokenDataset(
        cfg=cfg,
        seed=seed,
        tokenizer=indexes.load_tokenizer(folder, index),
        shape=shape,
        origin=origin,
        condition=condition,
        **splits,
    )


def _load_emoji(cfg: DataConfig, seed: int, size: int) -> TokenDataset:
    check_unset(cfg, _SPLIT_FIELDS, "is split by what its images show")
    shape = (size, size, 3)
    _check_image_len(cfg, shape)
    images, _, split_of = open_emoji(size)
    chosen = {name: images[np.array(split_of) == name] for name in SPLITS}
    splits = {
        name: PackedSplit(
            values.reshape(-1), np.full(len(values), math.prod(shape)), np.zeros(len(values), bool), cfg.sequence_len
        )
        for name, values in chosen.items()
    }
    held_out = dict.fromkeys(("validation", "test"), "whole concepts, by a hash of their names")
    origin = {"source": cfg.source, "root": "embedded", "left_out": {}, "held_out": held_out}
    return TokenDataset(
        cfg=cfg,
        seed=seed,
        tokenizer=BytesTokenizer(),
        shape=shape,
        origin=origin,
        condition=None if cfg.condition is None else load_emoji_condition(cfg.condition, split_of),
        **splits,
    )


def _check_image_len(cfg: DataConfig, shape: tuple[int, int, int] | None) -> None:
    if shape is not None and cfg.sequence_len != math.prod(shape):
        raise invalid(
            "data.sequence_len",
            cfg.sequence_len,
            f"one image of {cfg.source}, {' x '.join(map(str, shape))} values",
            f"use --data.sequence-len {math.prod(shape)} (and an update_len that divides it)",
        )
