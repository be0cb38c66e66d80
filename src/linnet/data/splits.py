"""Training and held-out splits: by named files, by a hash of file names, or by the tail of the stream."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64

from linnet.config.schema import DataConfig, PairsConfig
from linnet.core.errors import UserError, invalid
from linnet.data.sources.files import FileId, SourceFile, SourceFiles, find_held_out

SPLITS = ("train", "validation", "test")
MIN_FILLED = 0.9
"""Fraction of a held-out target in bytes that is sufficient. Filling it further with complete files would favour small ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSpan:
    """Bytes start to stop of a file; `ends` if the document ends here with an EOS id."""

    file: SourceFile
    start: int
    stop: int
    ends: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitPlan:
    spans: dict[str, tuple[FileSpan, ...]]
    left_out: dict[str, dict[str, int]]
    held_out: dict[str, str]
    """Description of how each held-out split was chosen."""


def check_split(name: str) -> None:
    if name not in SPLITS:
        raise invalid("split", name, f"one of {', '.join(SPLITS)}", "choose one of them")


def choose_evenly(n: int, limit: int | None) -> Int64[np.ndarray, " k"]:
    """Return at most `limit` positions, spread evenly over n; all without a limit."""
    if limit is not None and limit < 1:
        raise invalid("limit of the evaluation", limit, "at least 1, or none for all", "use None")
    k = n if limit is None else min(limit, n)
    return np.arange(k) * n // max(k, 1)


def check_unset(cfg: DataConfig | PairsConfig, names: Iterable[str], reason: str) -> None:
    """Check that settings which do not apply to the source have their default values."""
    defaults = {field.name: field.default for field in dataclasses.fields(cfg)}
    for name in names:
        if getattr(cfg, name) != defaults[name]:
            raise invalid(f"data.{name}", getattr(cfg, name), f"left unset: {cfg.source} {reason}", "leave it out")


def make_splits(source: SourceFiles, cfg: DataConfig) -> SplitPlan:
    """Split a source. Independent of the seed, so that the same text is held out in every run on the same files."""
    named = {
        split: find_held_out(patterns, source.root, f"data.{split}_files")
        for split, patterns in (("validation", cfg.validation_files), ("test", cfg.test_files))
        if patterns
    }
    _check_disjoint(named)
    excluded = {f.identity for chosen in named.values() for f in chosen.files}
    rest = tuple(f for f in source.files if f.identity not in excluded)
    if not rest:
        raise UserError(
            f"data.source is {cfg.source!r}, but all of its {len(source.files)} files are held out by "
            "data.validation_files and data.test_files. Fix: hold out fewer, or name a larger source."
        )
    # One rule for all splits; otherwise the held-out text would count EOS ids that training never saw.
    ends = len(rest) > 1
    fractions = {"test": cfg.test_fraction, "validation": cfg.validation_fraction}
    wanted = {split: fraction for split, fraction in fractions.items() if fraction > 0 and split not in named}
    spans, method = _by_fraction(rest, wanted, ends)
    return SplitPlan(
        spans={split: spans.get(split, ()) for split in SPLITS}
        | {split: _full_spans(chosen.files, ends) for split, chosen in named.items()},
        left_out={"source": source.left_out} | {split: chosen.left_out for split, chosen in named.items()},
        held_out=dict.fromkeys(wanted, method) | dict.fromkeys(named, "named files"),
    )


def _check_disjoint(named: dict[str, SourceFiles]) -> None:
    test = {f.identity for f in named["test"].files} if "test" in named else set()
    both = [f for f in named["validation"].files if f.identity in test] if "validation" in named else []
    if both:
        raise invalid(
            "data.test_files",
            str(both[0].path),
            "disjoint from data.validation_files, which names the same file",
            "take it out of one of them",
        )


def _by_fraction(
    files: tuple[SourceFile, ...], wanted: dict[str, float], ends: bool
) -> tuple[dict[str, tuple[FileSpan, ...]], str]:
    chosen = _by_hash(files, wanted) if len(files) > 1 else None
    if chosen is None:
        return _by_tail(_full_spans(files, ends), wanted), "the tail of the stream"
    # Each split keeps the order of the source.
    groups = {split: tuple(f for f in files if chosen.get(f.identity, "train") == split) for split in SPLITS}
    return {split: _full_spans(group, ends) for split, group in groups.items()}, "whole files, by a hash of their names"


def _by_hash(files: tuple[SourceFile, ...], wanted: dict[str, float]) -> dict[FileId, str] | None:
    """Return the split of each held-out file, or None if complete files cannot approximate the fractions.

    Files of up to a quarter of the target are taken first, so that no single file dominates a split; then larger ones. A file that
    would overshoot by more than is missing is skipped.
    """
    total = sum(f.size for f in files)
    queue = sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f.name)).digest())
    chosen: dict[FileId, str] = {}
    for split, fraction in wanted.items():
        target, taken = fraction * total, 0
        for cap, file in itertools.product((target / 4, 2 * target), queue):
            if taken >= MIN_FILLED * target:
                break
            if file.identity not in chosen and file.size <= min(cap, 2 * (target - taken)):
                chosen[file.identity] = split
                taken += file.size
        if taken < target / 2:
            return None
    return chosen if len(chosen) < len(files) else None


def _by_tail(documents: tuple[FileSpan, ...], wanted: dict[str, float]) -> dict[str, tuple[FileSpan, ...]]:
    """Split the concatenated documents at byte offsets: train, then validation, then test."""
    total = sum(d.size for d in documents)
    # Rounded down to bytes, with tolerance for floating-point error: 0.29 * 100 is 29.
    sizes = {split: int(wanted.get(split, 0) * total + 1e-6) for split in ("validation", "test")}
    offsets = (0, total - sum(sizes.values()), total - sizes["test"], total)
    return {
        split: _clip(documents, start, stop)
        for split, (start, stop) in zip(SPLITS, itertools.pairwise(offsets), strict=True)
    }


def _clip(documents: tuple[FileSpan, ...], start: int, stop: int) -> tuple[FileSpan, ...]:
    """Return the part of the stream between two byte offsets. Only the piece with a document's last byte has its EOS id."""
    spans: list[FileSpan] = []
    offset = 0
    for d in documents:
        first, last = max(start - offset, 0), min(stop - offset, d.size)
        if first < last:
            spans.append(FileSpan(file=d.file, start=first, stop=last, ends=d.ends and last == d.size))
        offset += d.size
    return tuple(spans)


def _full_spans(files: tuple[SourceFile, ...], ends: bool) -> tuple[FileSpan, ...]:
    return tuple(FileSpan(file=f, start=0, stop=f.size, ends=ends) for f in files)
