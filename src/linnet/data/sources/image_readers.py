"""Readers of encoded images, by file type: an image file, or the members of a zip, tar or parquet."""

from __future__ import annotations

import dataclasses
import tarfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from linnet.core.errors import UserError, invalid
from linnet.data.sources.archives import DAMAGE, is_disk_error, open_parquet, open_zip, zip_files

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm"})
DEFAULT_COLUMN = "image"
MAX_ENCODED_BYTES = 256 << 20
"""Larger files are skipped, so that memory is bounded."""
PARQUET_ROWS = 64
"""Rows read at a time."""
TAR_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class InputFile:
    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class ImageMember:
    """An image inside one input file; `read` is the number of bytes of that file read so far."""

    name: str
    encoded: bytes
    read: int


Reader = Callable[[InputFile, str | None, Counter[str]], Iterator[ImageMember]]
"""Reader of a file, given the parquet column; it counts what it skips, by reason."""


def skip_reason(name: str, size: int = 1) -> str | None:
    """Return the reason to skip an archive member, or None."""
    path = PurePosixPath(name)
    if any(part.startswith(".") or part == "__MACOSX" for part in path.parts if part not in (".", "..")):
        return "hidden"
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        return "not_a_picture"
    if not size:
        return "empty"
    return "too_large" if size > MAX_ENCODED_BYTES else None


def _read_image(file: InputFile, column: str | None, left_out: Counter[str]) -> Iterator[ImageMember]:
    if reason := skip_reason(file.path.name, file.size):
        left_out[reason] += 1
    else:
        yield ImageMember(file.name, file.path.read_bytes(), file.size)


def _read_zip(file: InputFile, column: str | None, left_out: Counter[str]) -> Iterator[ImageMember]:
    read = 0
    with open_zip(file.path) as archive:
        for info in sorted(zip_files(archive), key=lambda info: info.filename):
            read += info.compress_size
            reason = "encrypted" if info.flag_bits & 1 else skip_reason(info.filename, info.file_size)
            if reason is None:
                try:
                    encoded = archive.read(info)
                except Exception as error:
                    if is_disk_error(error):
                        raise
                    reason = "broken"
                else:
                    yield ImageMember(f"{file.name}/{info.filename}", encoded, read)
                    continue
            left_out[reason] += 1


def _read_tar(file: InputFile, column: str | None, left_out: Counter[str]) -> Iterator[ImageMember]:
    """Index the tar, then read its images in name order.

    Only a name and two numbers per image are in memory, for a tar with millions of them.
    """
    names: list[bytes] = []
    starts, sizes = array("q"), array("q")
    for info in tar_members(file.path):
        if info.isdir():
            continue
        is_contiguous = info.isreg() and info.sparse is None
        reason = skip_reason(info.name, info.size) if is_contiguous else "not_regular"
        if reason:
            left_out[reason] += 1
        else:
            names.append(info.name.encode("utf-8", "surrogateescape"))
            starts.append(info.offset_data)
            sizes.append(info.size)
    read = 0
    with open(file.path, "rb") as archive:
        for i in sorted(range(len(names)), key=names.__getitem__):
            archive.seek(starts[i])
            encoded = archive.read(sizes[i])
            if len(encoded) < sizes[i]:
                raise _damage_error(file.path, "it shrank while it was being read")
            read += sizes[i]
            yield ImageMember(f"{file.name}/{names[i].decode('utf-8', 'surrogateescape')}", encoded, read)


def tar_members(path: Path) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(path, "r:") as archive:
            while (info := archive.next()) is not None:
                # tarfile keeps every member, a kilobyte each.
                archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                yield info
            # tarfile takes a truncated or damaged header for the end. The real end is a block of zeros.
            end = archive.offset
    except DAMAGE as error:
        if is_disk_error(error):
            raise
        raise _damage_error(path, error) from None
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(TAR_BLOCK) != bytes(TAR_BLOCK):
            raise _damage_error(path, "it has no end marker where its last readable member ends")


def _read_parquet(file: InputFile, column: str | None, left_out: Counter[str]) -> Iterator[ImageMember]:
    name = column or DEFAULT_COLUMN
    row = 0
    with open_parquet(file.path) as parquet:
        n_rows = parquet.metadata.num_rows
        inside = f"{name}.bytes" if _is_struct(parquet.schema_arrow.field(name).type) else name
        for batch in parquet.iter_batches(PARQUET_ROWS, columns=[inside]):
            for value in batch.column(0).to_pylist():
                encoded = value.get("bytes") if isinstance(value, dict) else value
                row += 1
                if encoded is None:
                    left_out["null_rows"] += 1
                elif not encoded:
                    left_out["empty"] += 1
                else:
                    # Zero-padded, so that the order of rows is the order of names.
                    yield ImageMember(f"{file.name}:{row - 1:09}", encoded, file.size * row // n_rows)


def check_column(path: Path, schema: pa.Schema, column: str) -> None:
    usable = [field.name for field in schema if _is_bytes(field.type)]
    if column not in usable:
        names = ", ".join(usable) or f"none of its columns ({', '.join(schema.names)})"
        raise invalid("--column", column, f"a column of encoded images; in {path} that is {names}", "name one of them")


def has_images(schema: pa.Schema) -> bool:
    """Guess whether a parquet file contains images: bytes under another name may be anything."""
    return any(_is_bytes(f.type) and (f.name == DEFAULT_COLUMN or _is_struct(f.type)) for f in schema)


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    """Return whether a column is bytes, or the struct of `bytes` and `path` that Hugging Face writes."""
    import pyarrow as pa

    if isinstance(kind, pa.StructType):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _damage_error(path: Path, why: object) -> UserError:
    return UserError(f"{path} is corrupt or truncated ({why}). Fix: download or create it again, or leave it out.")


READERS: dict[str, Reader] = {
    **dict.fromkeys(IMAGE_SUFFIXES, _read_image),
    ".zip": _read_zip,
    ".tar": _read_tar,
    ".parquet": _read_parquet,
}
