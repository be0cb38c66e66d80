"""Match image, text and metadata shards by the number in their names, and report missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.vectors import Vectors
from linnet.data.sources.files import OUTSIDE_LINKS, match_files

MAX_LISTED = 3


def find_shards(pattern: str, suffix: str, field: str) -> list[Path]:
    """Return the files with this suffix that a file, folder or glob names, in numeric order."""
    matched = match_files(pattern, field=field)
    if matched is None:
        raise invalid(field, pattern, "an existing file, folder or glob", "correct the path")
    paths = [path for path in matched.paths if path.suffix.lower() == suffix]
    if not paths:
        n_outside = matched.left_out[OUTSIDE_LINKS]
        links = f" (left out: {n_outside} links that leave the folder)" if n_outside else ""
        raise invalid(
            field, pattern, f"a source with {suffix} files in it{links}", f"name the folder of the {suffix} files"
        )
    return sorted(paths, key=natural_key)


def natural_key(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that compares numbers in a name as numbers: img_emb_10 comes after img_emb_2."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)], path.as_posix()


def shard_number(path: Path) -> int | None:
    """Return the last number in the name: 3 for img_emb_3.npy."""
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


def match_shards(images: Sequence[Path], others: Sequence[Path], what: str) -> list[Path]:
    """Return the partner of each image file: by number if all numbers are unique, else by order."""
    by_number, other_by_number = _numbered(images), _numbered(others)
    if by_number is None or other_by_number is None:
        if len(images) != len(others):
            raise UserError(
                f"there are {len(images)} image shards ({images[0].parent}) and {len(others)} {what} shards "
                f"({others[0].parent}), and their names have no numbers to match them by. Fix: make one {what} shard for each "
                "image shard, or number them (img_emb_0.npy, text_emb_0.npy, ...)."
            )
        return list(others)
    without_other = sorted(by_number.keys() - other_by_number.keys())
    without_image = sorted(other_by_number.keys() - by_number.keys())
    for missing, existing, kind in (
        (without_other, by_number, f"a {what} shard"),
        (without_image, other_by_number, "an image shard"),
    ):
        if missing:
            raise UserError(
                f"{_list_first(str(existing[n]) for n in missing)} {'have' if len(missing) > 1 else 'has'} no partner: {kind} "
                f"with the number {_list_first(map(str, missing))} is missing. Fix: download or create it, or remove its partner."
            )
    return [other_by_number[number] for number in by_number]


def find_gaps(paths: Sequence[Path]) -> list[str]:
    """Return a warning if numbers are missing between the first and the last."""
    numbered = _numbered(paths)
    if numbered is None or len(numbered) < 2:
        return []
    missing = sorted(set(range(min(numbered), max(numbered))) - numbered.keys())
    if not missing:
        return []
    return [
        f"Of the shards {min(numbered)} to {max(numbered)} in {paths[0].parent}, {len(missing):,} "
        f"{'are' if len(missing) > 1 else 'is'} missing: number {_list_first(map(str, missing))}. Their rows are not read."
    ]


def check_aligned(images: Vectors, others: Vectors, what: str) -> None:
    """Check row counts per shard, so that the message names the shard that differs."""
    for image, other in zip(images.shards, others.shards, strict=True):
        check_row_counts(image.path, image.n_rows, other.path, other.n_rows, what)


def check_row_counts(image: Path, n_image: int, other: Path, n_other: int, what: str) -> None:
    if n_image != n_other:
        raise UserError(
            f"{image} has {n_image:,} rows, but {other} has {n_other:,}: from row {min(n_image, n_other):,} on no image has "
            f"its {what}. Fix: make both from the same rows again, or leave both shards out."
        )


def _numbered(paths: Sequence[Path]) -> dict[int, Path] | None:
    numbers = [shard_number(path) for path in paths]
    by_number = {number: path for number, path in zip(numbers, paths, strict=True) if number is not None}
    return by_number if len(by_number) == len(paths) else None


def _list_first(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED:,} more" if len(listed) > MAX_LISTED else ""
    return ", ".join(listed[:MAX_LISTED]) + more
