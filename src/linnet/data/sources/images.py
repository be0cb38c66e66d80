"""Encoded images from files, folders, zips, tars and parquet, one at a time in name order.

Images are not decoded here; workers decode them when they need the pixels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from linnet.core.errors import UserError, invalid
from linnet.data.sources.archives import open_parquet, open_zip, zip_files
from linnet.data.sources.files import format_left_out, match_files, reading
from linnet.data.sources.image_readers import (
    DEFAULT_COLUMN,
    IMAGE_SUFFIXES,
    READERS,
    InputFile,
    check_column,
    has_images,
    skip_reason,
)
from linnet.data.sources.unpack_budget import UnpackBudget

PACKED = (".zip", ".parquet")
COMPRESSED_TARS = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    name: str
    """The path below the root with '/', then the member or the row: the same on every machine."""
    split: str | None
    """The split, if the source has predefined splits."""
    encoded: bytes
    position: int
    """Input bytes read so far, of `n_bytes`."""


class ImageSource(Protocol):
    @property
    def n_bytes(self) -> int | None:
        """Size of the input on disk."""
        ...

    @property
    def left_out(self) -> Counter[str]:
        """Counts of skipped items by reason; filled while reading."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return plain values that change when the input or an option does."""
        ...

    def images(self) -> Iterator[EncodedImage]:
        """Yield images in name order, in bounded memory."""
        ...


class ImageFiles:
    """The images of some input files, each an image or a container of many."""

    def __init__(
        self,
        source: str,
        files: tuple[InputFile, ...],
        initial_left_out: Counter[str],
        column: str | None,
        max_unpacked_gb: float | None = None,
    ) -> None:
        packed = sum(file.size for file in files if file.path.suffix.lower() in PACKED)
        self._make_budget = functools.partial(UnpackBudget, source, packed, max_unpacked_gb)
        self._budget = self._make_budget()
        self.n_bytes = sum(file.size for file in files)
        self.left_out = Counter(initial_left_out)
        self._source, self._files, self._initial_left_out, self._column = source, files, initial_left_out, column

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(f"{file.name}\0{file.size}\0{file.mtime_ns}\0".encode("utf-8", "surrogateescape"))
        # A digest, because there may be a million files.
        return {
            "kind": "pictures",
            "column": self._column,
            "n_files": len(self._files),
            "n_bytes": self.n_bytes,
            "files_sha256": digest.hexdigest(),
        }

    @property
    def unpacked_bytes(self) -> int:
        """Bytes unpacked in the last pass over the source."""
        return self._budget.n_bytes

    def images(self) -> Iterator[EncodedImage]:
        # The counts restart with each pass.
        self.left_out.clear()
        self.left_out.update(self._initial_left_out)
        start, n = 0, 0
        self._budget = self._make_budget()
        for file in self._files:
            with reading(file.path):
                for member in READERS[file.path.suffix.lower()](file, self._column, self.left_out):
                    n += 1
                    if file.path.suffix.lower() in PACKED:
                        self._budget.spend(len(member.encoded))
                    yield EncodedImage(member.name, None, member.encoded, start + min(member.read, file.size))
            start += file.size
        if not n:
            raise _no_images(self._source, self.left_out)


def open_images(source: str, *, column: str | None = None, max_unpacked_gb: float | None = None) -> ImageSource:
    """Open an image, a zip, tar or parquet of images, or a folder or glob of any of these.

    `column` is the parquet column with the encoded bytes; other files have none.
    """
    if source.lower().endswith(COMPRESSED_TARS):
        raise invalid("SOURCE", source, "an uncompressed tar, for random access", "decompress it to a .tar")
    matched = match_files(source)
    if matched is None:
        raise invalid("SOURCE", source, "an existing image, zip, tar, parquet, folder or glob", "correct the path")
    files, left_out = _select_files(matched.root, matched.paths)
    left_out += matched.left_out
    if not files:
        raise _no_images(source, left_out)
    parquets = [file for file in files if file.path.suffix.lower() == ".parquet"]
    if column is not None and not parquets:
        raise invalid("--column", column, "omitted for a source without parquet files", "leave it out")
    for file in parquets:
        # Each footer is read now, so that a wrong column is not found only after hours of work.
        with reading(file.path), open_parquet(file.path) as parquet:
            check_column(file.path, parquet.schema_arrow, column or DEFAULT_COLUMN)
    return ImageFiles(source, files, left_out, column, max_unpacked_gb)


def _no_images(source: str, left_out: Counter[str]) -> UserError:
    return invalid(
        "SOURCE",
        source,
        f"a source with images in it (left out: {format_left_out(left_out) or 'nothing'})",
        f"name images ({' '.join(sorted(IMAGE_SUFFIXES))}), or a .zip, .tar or .parquet of them",
    )


def contains_images(source: str) -> bool:
    """Return whether a source should be read as images: more of its files are, or contain, images than not.

    A file with the same stem as an image (a caption, a label) does not count. False if there are no files.
    """
    if source.lower().endswith(COMPRESSED_TARS):
        return True  # `open_images` reports the fix; as text it would be noise
    matched = match_files(source)
    paths = matched.paths if matched else []
    by_suffix: dict[str, list[Path]] = {}
    for path in paths:
        by_suffix.setdefault(path.suffix.lower(), []).append(path)
    images = [path for suffix, group in by_suffix.items() if _has_images(suffix, group[0]) for path in group]
    stems, chosen = {path.with_suffix("") for path in images}, set(images)
    others = sum(path not in chosen and path.with_suffix("") not in stems for path in paths)
    return len(images) > others


def _has_images(suffix: str, path: Path) -> bool:
    """Decide by the first file of a suffix. Damage is not reported here: opening the file raises the error."""
    if suffix in IMAGE_SUFFIXES or suffix == ".tar":
        return True
    if suffix == ".zip":
        with contextlib.suppress(UserError), reading(path), open_zip(path) as archive:
            reasons = [skip_reason(info.filename) for info in zip_files(archive)]
            return 2 * reasons.count(None) > len(reasons)
    if suffix == ".parquet":
        with contextlib.suppress(UserError), reading(path), open_parquet(path) as parquet:
            return has_images(parquet.schema_arrow)
    return False


def _select_files(root: Path, paths: list[Path]) -> tuple[tuple[InputFile, ...], Counter[str]]:
    """Return the regular files that may contain images, once each and sorted by name, and counts of what was left out."""
    files: dict[tuple[int, int], InputFile] = {}
    left_out: Counter[str] = Counter()
    for name, path in sorted((Path(os.path.relpath(path, root)).as_posix(), path) for path in paths):
        suffix = path.suffix.lower()
        if suffix not in READERS:
            left_out["not_a_picture"] += 1
            continue
        try:
            info = path.stat()
        except FileNotFoundError:  # a broken link
            left_out["not_regular"] += 1
            continue
        if not stat.S_ISREG(info.st_mode):
            left_out["not_regular"] += 1
        elif not info.st_size:
            left_out["empty"] += 1
        elif (info.st_dev, info.st_ino) in files:
            left_out["linked_twice"] += 1  # otherwise a held-out image could be trained on under another name
        else:
            files[info.st_dev, info.st_ino] = InputFile(path, name, info.st_size, info.st_mtime_ns)
    return tuple(files.values()), left_out
