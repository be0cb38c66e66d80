"""Packed files as streams of bytes: what a name says it holds, how to unpack it, and one error for what is broken."""

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
from typing import BinaryIO, Literal, cast

from linnet.core.errors import UserError

CODECS = (".gz", ".bz2", ".xz", ".zst")
SHORT_TARS = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
PACKED = (*CODECS, *SHORT_TARS, ".zip", ".tar", ".parquet")
"""Endings of names whose content is unpacked, not taken as it is."""
TAR_BLOCK = 512

Kind = Literal["text", "jsonl", "parquet", "zip", "tar"]


def kind_of(name: str) -> tuple[Kind, str]:
    """What a file of that name holds, and the codec around it ("" for none). Parquet and zip pack themselves."""
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
"""What Python's readers of archives raise on damaged content. (Of OSError, those that `is_disk_error` does not claim.)"""


def is_disk_error(error: BaseException) -> bool:
    """Whether the system refused, as opposed to the content being damaged. Decoders raise OSError without a number; EINVAL comes
    from seeking to a place that damaged content names."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


@contextlib.contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip (or .npz); damage that shows now or while it is read is an error that names the file."""
    with unpacking(path), zipfile.ZipFile(path) as archive:
        yield archive


def zip_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The members that are not folders. (`ZipInfo.is_dir` fails on an empty name.)"""
    return [info for info in archive.infolist() if not info.filename.endswith("/")]


@contextlib.contextmanager
def unpacking(path: str | PathLike[str]) -> Iterator[None]:
    """Turns every way in which a packed file can be broken into a message that names it."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, UserError) or is_disk_error(error):
            raise
        raise _broken(path, error) from None


def _broken(path: str | PathLike[str], error: Exception) -> UserError:
    return UserError(
        f"{path} is damaged or cut short, and cannot be unpacked ({error or type(error).__name__}). Fix: it is broken or not what "
        "its name says; fetch or pack it again, or leave it out of the source."
    )


def decompressed(codec: str, raw: BinaryIO) -> BinaryIO:
    """The bytes inside one codec; several packed streams one after another count as one."""
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
    """Each file of a zip with its bytes, in the zip's order. A stream must be read before the next is asked for."""
    with zipfile.ZipFile(raw) as archive:
        for info in zip_files(archive):
            if info.flag_bits & 0x1:
                raise zipfile.BadZipFile(f"{info.filename} is encrypted")
            if _hidden(info.filename):
                left_out["hidden"] += 1
                continue
            with archive.open(info) as stream:
                yield info.filename, cast(BinaryIO, stream)


def tar_members(stream: BinaryIO, left_out: Counter[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Each file of a tar with its bytes, in the tar's order, in one pass. Streams as for `zip_members`."""
    watched = _LastBlock(stream)
    with tarfile.open(fileobj=cast(BinaryIO, watched), mode="r|") as archive:
        for info in archive:
            if info.isdir():
                continue
            content = archive.extractfile(info) if info.isreg() else None
            if content is None:
                left_out["not_regular"] += 1
            elif _hidden(info.name):
                left_out["hidden"] += 1
            else:
                yield info.name, cast(BinaryIO, content)
    # tarfile takes a tar that was cut inside a header for a whole one; only the zero blocks at the end tell.
    if any(watched.last):
        raise tarfile.ReadError("it ends before its end mark")


class _LastBlock:
    """Reads through, and remembers the last bytes that came."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, n: int) -> bytes:
        data = self._stream.read(n)
        self.last = (self.last + data[-TAR_BLOCK:])[-TAR_BLOCK:]
        return data


def _hidden(name: str) -> bool:
    """Names with a dot in front, and the folder in which macOS keeps what only it understands."""
    parts = [part for part in name.split("/") if part != "."]
    return any(part.startswith(".") for part in parts) or "__MACOSX" in parts
