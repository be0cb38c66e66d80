"""Iterate over images with their captions in a fixed order, as input of `linnet data embed`.

Sources: a folder of images with a .txt of the same name beside each, or with one captions file; parquet with both columns;
webdataset tars with .txt or .json members; the built-in emoji.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.data.sources.archives import open_parquet
from linnet.data.sources.files import match_files, reading
from linnet.data.sources.image_readers import (
    DEFAULT_COLUMN,
    IMAGE_SUFFIXES,
    check_column,
    tar_members,
)
from linnet.data.sources.images import COMPRESSED_TARS

CAPTION_FILES = ("captions.json", "captions.jsonl", "captions.parquet", "metadata.jsonl")
FILE_KEYS = ("file_name", "file", "image_path", "image", "path", "filename", "name")
EMOJI = "emoji-32"
PARQUET_ROWS = 64


@dataclasses.dataclass(frozen=True)
class CaptionedImage:
    name: str
    read_image: Callable[[], bytes]
    """Reads the encoded image. Lazy, so that samples that are already embedded are skipped without reading them."""
    caption: str | None
    split: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionedSource:
    identity: dict[str, Any]
    """Plain values that change when the input does."""
    samples: Callable[[], Iterator[CaptionedImage]]
    has_splits: bool = False


def open_captioned(source: str, caption_key: str = "caption", image_key: str | None = None) -> CaptionedSource:
    if source == EMOJI:
        return CaptionedSource(identity={"source": EMOJI}, samples=_emoji, has_splits=True)
    if source.lower().endswith(COMPRESSED_TARS):
        raise invalid("SOURCE", source, "an uncompressed tar, for random access", "decompress it to a .tar")
    matched = match_files(source)
    if matched is None:
        raise invalid(
            "SOURCE", source, f"images with captions: a folder, glob, tar or parquet, or {EMOJI}", "correct the path"
        )
    root, paths = matched.root, sorted(matched.paths)
    tables = [path for path in paths if path.name in CAPTION_FILES]
    images = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]
    tars = [path for path in paths if path.suffix.lower() == ".tar"]
    parquets = [path for path in paths if path.suffix.lower() == ".parquet" and path not in tables]
    kinds = [kind for kind, files in (("pictures", images), ("tar", tars), ("parquet", parquets)) if files]
    if len(kinds) != 1:
        raise invalid(
            "SOURCE",
            source,
            f"images, webdataset tars or parquet with images, one of them (it has {' and '.join(kinds) or 'none'})",
            "name one kind, for example with a glob",
        )
    texts = [] if tables else [path for path in paths if path.suffix.lower() == ".txt"]
    used = [*tables, *texts, *images] if images else tars or parquets
    identity = {"source": source, "caption_key": caption_key, "image_key": image_key, "files": _digest(root, used)}
    if tars:
        samples = lambda: _from_tars(tars, caption_key)  # noqa: E731
    elif parquets:
        column = image_key or DEFAULT_COLUMN
        for path in parquets:
            with reading(path), open_parquet(path) as parquet:
                check_column(path, parquet.schema_arrow, column)
                if caption_key not in parquet.schema_arrow.names:
                    names = ", ".join(parquet.schema_arrow.names)
                    raise invalid("--caption-key", caption_key, f"a column of {path} ({names})", "name one of them")
        samples = lambda: _from_parquet(root, parquets, column, caption_key)  # noqa: E731
    else:
        captions = _read_tables(tables, caption_key)
        samples = lambda: _from_folder(root, images, captions)  # noqa: E731
    return CaptionedSource(identity=identity, samples=samples)


def _emoji() -> Iterator[CaptionedImage]:
    from linnet.data.images import to_png
    from linnet.data.sources.emoji import open_emoji

    for i, (image, caption, split) in enumerate(zip(*open_emoji(32), strict=True)):
        yield CaptionedImage(f"{EMOJI}/{i}", lambda image=image: to_png(image), caption, split)


def _from_folder(root: Path, images: list[Path], captions: dict[str, str] | None) -> Iterator[CaptionedImage]:
    for path in images:
        name = Path(os.path.relpath(path, root)).as_posix()
        if captions is not None:
            caption = captions.get(name, captions.get(path.name, captions.get(path.stem)))
        else:
            text = path.with_suffix(".txt")
            caption = None
            if text.is_file():
                with reading(text):
                    caption = text.read_text("utf-8", "replace").strip()
        yield CaptionedImage(name, path.read_bytes, caption)


def _from_tars(tars: list[Path], key: str) -> Iterator[CaptionedImage]:
    for path in tars:
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        with reading(path):
            for info in tar_members(path):
                member = PurePosixPath(info.name)
                stem, _, ending = member.name.partition(".")
                if info.isreg() and info.sparse is None and stem:
                    kind = "image" if f".{ending.lower()}" in IMAGE_SUFFIXES else ending.lower()
                    samples.setdefault(str(member.parent / stem), {})[kind] = (info.offset_data, info.size)
        for name, members in samples.items():
            if "image" not in members:
                continue
            caption = None
            if text := members.get("txt") or members.get("caption"):
                caption = _read_range(path, *text).decode("utf-8", "replace").strip()
            elif metadata := members.get("json"):
                caption = _parse_caption(_read_range(path, *metadata), key)
            start, size = members["image"]
            yield CaptionedImage(
                f"{path.name}/{name}", lambda path=path, start=start, size=size: _read_range(path, start, size), caption
            )


def _read_range(path: Path, start: int, size: int) -> bytes:
    with reading(path), open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def _parse_caption(text: bytes, key: str) -> str | None:
    try:
        caption = parse_json(text).get(key)
    except (ValueError, AttributeError):
        return None
    return None if caption is None else str(caption)


def _from_parquet(root: Path, paths: list[Path], column: str, key: str) -> Iterator[CaptionedImage]:
    for path in paths:
        row = 0
        with reading(path), open_parquet(path) as parquet:
            for batch in parquet.iter_batches(PARQUET_ROWS, columns=[column, key]):
                for value, caption in zip(batch.column(column).to_pylist(), batch.column(key).to_pylist(), strict=True):
                    encoded = (value.get("bytes") if isinstance(value, dict) else value) or b""
                    name = f"{Path(os.path.relpath(path, root)).as_posix()}:{row:09}"
                    yield CaptionedImage(
                        name, lambda encoded=encoded: encoded, None if caption is None else str(caption)
                    )
                    row += 1


def _read_tables(paths: list[Path], key: str) -> dict[str, str] | None:
    """Return captions by image name; None if each image has a caption file of its own."""
    if not paths:
        return None
    captions: dict[str, str] = {}
    for path in paths:
        for name, caption in _table_rows(path, key):
            captions[name] = caption
    return captions


def _table_rows(path: Path, key: str) -> Iterator[tuple[str, str]]:
    if path.suffix == ".parquet":
        with reading(path), open_parquet(path) as parquet:
            rows = parquet.read().to_pylist()
    else:
        with reading(path):
            text = path.read_text("utf-8", "replace")
        try:
            rows = (
                [parse_json(line) for line in text.splitlines() if line.strip()]
                if path.suffix == ".jsonl"
                else parse_json(text)
            )
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}). Fix: correct it.") from None
    if isinstance(rows, dict) and all(isinstance(caption, str) for caption in rows.values()):
        yield from rows.items()
        return
    for i, row in enumerate(rows):
        file = next((str(row[name]) for name in FILE_KEYS if row.get(name)), None) if isinstance(row, dict) else None
        if file is None or row.get(key) is None:
            raise UserError(
                f"{path}, entry {i} does not name an image and its {key}. Fix: write {{image: caption}}, or entries with "
                f"`file_name` and `{key}`."
            )
        yield file, str(row[key])


def _digest(root: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with reading(path):
            info = path.stat()
        name = Path(os.path.relpath(path, root)).as_posix()
        digest.update(f"{name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
