"""Compressed files and archives as byte streams: detect the format by name, unpack it, and report damage with one error."""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from linnet.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

CODECS = (".gz", ".bz2", ".xz", ".zst")
SHORT_TARS = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
PACKED = (*CODECS, *SHORT_TARS, ".zip", ".tar", ".parquet")
"""Suffixes of files whose content is unpacked."""
TAR_BLOCK = 512

Kind = Literal["text", "jsonl", "parquet", "zip", "tar"]


def detect_format(name: str) -> tuple[Kind, str]:
    """Return the kind of content of a file by its name, and its codec ("" for none). Parquet and zip compress themselves."""
    name = name.lower()
    for short, long in SHORT_TARS.items():
        name = name.removesuffix(short) + long if name.endswith(short) else name
    codec = next((c for c in CODECS if name.endswith(c)), "")
    inner = name.removesuffix(codec)
    if inner.endswith((".jsonl", ".ndjson")):
        return "jsonl", codec
    if inner.endswith(".tar"):
        return "tar", codec
    if not codec and inner.endswith(".zip"):
        return "zip", codec
    if not codec and inner.endswith(".parquet"):
        return "parquet", codec
    return "text", codec


DAMAGE = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    ArithmeticError,
    LookupError,
    RuntimeError,
    OSError,
    ValueError,
)
"""Exceptions that Python's archive readers raise on damaged content. (Of OSError, those for which `is_disk_error` is false.)"""


def is_disk_error(error: BaseException) -> bool:
    """Return whether the system call failed, as opposed to damaged content.

    Decoders raise OSError without a number; EINVAL comes from seeking to an offset given by damaged content.
    """
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


@contextlib.contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip (or .npz); damage found now or while reading is an error that names the file."""
    with unpacking(path), zipfile.ZipFile(path) as archive:
        yield archive


def zip_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members that are not folders. (`ZipInfo.is_dir` fails on an empty name.)"""
    return [info for info in archive.infolist() if not info.filename.endswith("/")]


@contextlib.contextmanager
def unpacking(path: str | PathLike[str]) -> Iterator[None]:
    """Convert every error of a damaged file to a `UserError` that names it."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, UserError) or is_disk_error(error):
            raise
        raise _damage_error(path, error) from None


def _damage_error(path: str | PathLike[str], error: Exception) -> UserError:
    return UserError(
        f"{path} is corrupt or truncated, and cannot be unpacked ({error or type(error).__name__}). Fix: it is broken or not what "
        "its name says; download or pack it again, or leave it out of the source."
    )


@contextlib.contextmanager
def open_parquet(path: str | PathLike[str], *, memory_map: bool = False) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; damage found now or while reading is an error that names the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without `pre_buffer` pages are read as needed, not a complete row group at once.
        with pq.ParquetFile(path, memory_map=memory_map, pre_buffer=False) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last from a broken column name
        if is_disk_error(error):
            raise
        reason = str(error).splitlines()[0].rstrip(". ") if str(error) else type(error).__name__
        raise UserError(
            f"{path} is not a complete parquet file ({reason}). Fix: download or create it again, or leave it out."
        ) from None


def decompress(codec: str, raw: BinaryIO) -> BinaryIO:
    """Return the decompressed stream; concatenated streams are read as one."""
    if codec == ".gz":
        import gzip

        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if codec == ".bz2":
        import bz2

        return cast(BinaryIO, bz2.BZ2File(raw))
    if codec == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if codec == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"), 1 << 20)
    assert not codec, codec
    return raw


def zip_members(raw: BinaryIO, left_out: Counter[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file of a zip with its stream, in archive order. A stream must be read before the next is requested."""
    with zipfile.ZipFile(raw) as archive:
        for info in zip_files(archive):
            if info.flag_bits & 0x1:
                raise zipfile.BadZipFile(f"{info.filename} is encrypted")
            if _is_hidden(info.filename):
                left_out["hidden"] += 1
                continue
            with archive.open(info) as stream:
                yield info.filename, cast(BinaryIO, stream)


def tar_members(stream: BinaryIO, left_out: Counter[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file of a tar with its stream, in archive order and one pass. Streams as for `zip_members`."""
    tracked = _LastBlock(stream)
    with tarfile.open(fileobj=cast(BinaryIO, tracked), mode="r|") as archive:
        for info in archive:
            if info.isdir():
                continue
            content = archive.extractfile(info) if info.isreg() else None
            if content is None:
                left_out["not_regular"] += 1
            elif _is_hidden(info.name):
                left_out["hidden"] += 1
            else:
                yield info.name, cast(BinaryIO, content)
    # tarfile accepts a tar that was truncated inside a header; only the zero blocks at the end prove that it is complete.
    if any(tracked.last):
        raise tarfile.ReadError("it ends before its end marker")


class _LastBlock:
    """Stream wrapper that remembers the last bytes read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, n: int) -> bytes:
        data = self._stream.read(n)
        self.last = (self.last + data[-TAR_BLOCK:])[-TAR_BLOCK:]
        return data


def _is_hidden(name: str) -> bool:
    """Return whether a member is hidden: a dotfile, or in the __MACOSX metadata folder."""
    parts = [part for part in name.split("/") if part != "."]
    return any(part.startswith(".") for part in parts) or "__MACOSX" in parts
