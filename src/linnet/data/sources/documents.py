"""Any text source as a stream of documents, split into parts that fit in memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

from linnet.core.errors import UserError, invalid
from linnet.data.sources.archives import PACKED, decompress, detect_format, tar_members, unpacking, zip_members
from linnet.data.sources.files import SNIFF_BYTES, SourceFile, find_files, format_left_out, reading
from linnet.data.sources.records import HUB, HubDataset, json_rows, open_hub, open_text_column, parquet_rows
from linnet.data.sources.unpack_budget import UnpackBudget, count_bytes

PART_BYTES = 4 << 20
NEWLINE_WITHIN = 64 << 10
DEFAULT_COLUMN = "text"


@dataclasses.dataclass(frozen=True)
class DocumentPart:
    """At most PART_BYTES of one document; the parts of a document are consecutive."""

    name: str
    """Name of the document, the same on every machine: the path below the root, 'file.jsonl:17', 'archive.zip/inside.txt'."""
    data: bytes
    first: bool
    """Whether the document begins here."""
    last: bool
    """Whether the document ends here."""
    split: str | None
    """'train', 'validation' or 'test' if the source has predefined splits."""
    position: int
    """Bytes of the input read so far, of `n_bytes`; non-decreasing."""


class Documents(Protocol):
    left_out: Counter[str]
    """Counts of skipped items by reason; filled while reading."""

    @property
    def ends_with_eos(self) -> bool:
        """Whether an EOS id follows each document."""
        ...

    @property
    def is_single(self) -> bool:
        """Whether there is only one document, which is then split by its tail."""
        ...

    @property
    def n_bytes(self) -> int | None:
        """Size of the input on disk."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return plain values that change when the options or the input do."""
        ...

    def parts(self) -> Iterator[DocumentPart]: ...


def open_documents(source: str, *, column: str | None = None, max_unpacked_gb: float | None = None) -> Documents:
    """Open a source, and check names, columns and archives before any work starts."""
    if source.startswith(HUB):
        hub = HubDocuments(open_hub(source, column or DEFAULT_COLUMN))
        next(hub.parts())  # raises if the column does not exist
        return hub
    sources = find_files(source, "SOURCE", PACKED)
    if column is not None and not any(
        detect_format(f.name)[0] in ("jsonl", "parquet", "zip", "tar") for f in sources.files
    ):
        raise invalid("--column", column, "omitted, since the source is plain text", "leave --column out")
    documents = FileDocuments(
        sources.files,
        column=column or DEFAULT_COLUMN,
        left_out=Counter(sources.left_out),
        max_unpacked_gb=max_unpacked_gb,
    )
    documents.check()
    return documents


PartBytes = tuple[bytes, bool, bool]
"""Bytes of a document, whether they are its first, whether they are its last."""


def split_stream(read: Callable[[int], bytes]) -> Iterator[PartBytes]:
    """Split one document into parts of at most PART_BYTES; yields none for an empty one.

    A part ends after a line if one ends nearby, else between two characters, so that parts can be encoded separately.
    """
    rest, first = b"", True
    while True:
        data = rest + _read_fully(read, PART_BYTES + 1 - len(rest))
        if len(data) <= PART_BYTES:
            if data:
                yield data, first, True
            return
        at = _find_split(data)
        yield data[:at], first, False
        rest, first = data[at:], False


def split_text(text: bytes) -> Iterable[PartBytes]:
    """Split a document that is in memory."""
    return [(text, True, True)] if 0 < len(text) <= PART_BYTES else split_stream(io.BytesIO(text).read)


def _read_fully(read: Callable[[int], bytes], n: int) -> bytes:
    blocks: list[bytes] = []
    while n and (data := read(n)):
        blocks.append(data)
        n -= len(data)
    return b"".join(blocks)


def _find_split(data: bytes) -> int:
    """Return where to end a part, given one byte more than it may hold."""
    end = PART_BYTES
    newline = data.rfind(b"\n", max(end - NEWLINE_WITHIN, 0), end)
    if newline >= 0:
        return newline + 1
    # A UTF-8 character has at most three bytes 10xxxxxx after its first.
    return next((at for at in range(end, max(end - 4, 0), -1) if data[at] & 0xC0 != 0x80), end)


class FileDocuments:
    """Documents in files, by file name: text, compressed text, archives, JSON lines, parquet."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        column: str,
        left_out: Counter[str],
        split_of: Callable[[str], str | None] | None = None,
        max_unpacked_gb: float | None = None,
    ) -> None:
        """`split_of` returns the split of a document by its name; a document without a split is skipped."""
        assert files
        self._files = files
        self._column = column
        self._initial_left_out = left_out
        self._split_of = split_of
        self.left_out = Counter(left_out)
        self.n_bytes = sum(f.size for f in files)
        packed = sum(f.size for f in files if f.name.lower().endswith(PACKED))
        where = str(files[0].path) if len(files) == 1 else f"the source of {len(files):,} files ({files[0].path}, ...)"
        self._make_budget = functools.partial(UnpackBudget, where, packed, max_unpacked_gb)
        self._budget = self._make_budget()
        self.is_single = split_of is None and len(files) == 1 and self._has_one_text(files[0])
        self.ends_with_eos = not self.is_single

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()  # a digest, because the list may have a million entries
        for f in self._files:
            with reading(f.path):
                info = f.path.stat()
            digest.update(f"{_printable(f.name)}\0{info.st_size}\0{info.st_mtime_ns}\n".encode())
        return {
            "kind": "files",
            "column": self._column,
            "n_files": len(self._files),
            "n_bytes": self.n_bytes,
            "files_sha256": digest.hexdigest(),
        }

    def check(self) -> None:
        """Read the beginnings, so that missing columns and broken files are reported before any work starts."""
        if len(self._files) == 1:
            next(self.parts())  # raises for a source without any text
        else:
            for file in self._files:
                if detect_format(file.name)[0] in ("jsonl", "parquet"):
                    next(self._file_parts(file, 0), None)
        self._reset()

    def parts(self) -> Iterator[DocumentPart]:
        self._reset()
        before, any_text = 0, False
        for file in self._files:
            for part in self._file_parts(file, before):
                any_text = True
                yield part
            before += file.size
        if not any_text:
            more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
            raise _no_text(f"{self._files[0].path}{more}", self.left_out)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes unpacked in the last pass over the source."""
        return self._budget.n_bytes

    def _reset(self) -> None:
        self._budget = self._make_budget()
        self.left_out.clear()
        self.left_out.update(self._initial_left_out)

    def _has_one_text(self, file: SourceFile) -> bool:
        kind, _ = detect_format(file.name)
        if kind != "zip":
            return kind == "text"
        with reading(file.path), unpacking(file.path), open(file.path, "rb") as raw:
            names = [name for name, _ in itertools.islice(zip_members(raw, Counter()), 2)]
        return len(names) == 1 and detect_format(names[0])[0] == "text"

    def _file_parts(self, file: SourceFile, before: int) -> Iterator[DocumentPart]:
        kind, codec = detect_format(file.name)
        with reading(file.path), unpacking(file.path):
            if kind == "parquet":
                yield from self._parquet_parts(file, before)
                return
            with open(file.path, "rb") as raw:
                position = _monotonic_position(before, file.size, raw.tell)
                if kind == "zip":
                    members = zip_members(raw, self.left_out)
                elif kind == "tar":
                    members = tar_members(self._unpacked(codec, raw), self.left_out)
                else:
                    yield from self._stream_parts(file, "", raw, position)
                    return
                for name, stream in members:
                    packed = kind == "zip"  # the bytes of a tar are counted already
                    yield from self._stream_parts(
                        file, f"/{name}", count_bytes(stream, self._budget) if packed else stream, position
                    )

    def _parquet_parts(self, file: SourceFile, before: int) -> Iterator[DocumentPart]:
        with open_text_column(file.path, self._column) as table:
            n_rows = table.metadata.num_rows
            for row, text in parquet_rows(table, self._column, self.left_out):
                self._budget.spend(len(text))
                at = before + file.size * min(row, n_rows) // n_rows
                yield from self._document(f"{file.name}:{row}", split_text(text), lambda at=at: at)

    def _stream_parts(
        self, file: SourceFile, member: str, raw: BinaryIO, position: Callable[[], int]
    ) -> Iterator[DocumentPart]:
        name = file.name + member
        kind, codec = detect_format(name)
        if kind in ("zip", "tar", "parquet"):
            self.left_out["packed_twice"] += 1
            return
        stream = self._unpacked(codec, raw)
        if kind == "jsonl":
            for number, text in json_rows(stream, f"{file.path}{member}", self._column, self.left_out):
                yield from self._document(f"{name}:{number}", split_text(text), position)
            return
        head = _read_fully(stream.read, SNIFF_BYTES)
        if b"\0" in head:
            self.left_out["binary"] += 1
            return
        yield from self._document(name, split_stream(_with_head(head, stream.read)), position)

    def _unpacked(self, codec: str, raw: BinaryIO) -> BinaryIO:
        return count_bytes(decompress(codec, raw), self._budget) if codec else raw

    def _document(self, name: str, parts: Iterable[PartBytes], position: Callable[[], int]) -> Iterator[DocumentPart]:
        split = self._split_of(name) if self._split_of else None
        if self._split_of and split is None:
            self.left_out["outside_splits"] += 1
            return
        name, empty = _printable(name), True
        for data, first, last in parts:
            empty = False
            yield DocumentPart(name, data, first, last, split, position())
        if empty:
            self.left_out["empty"] += 1


class HubDocuments:
    """A Hugging Face dataset: each row is a document, with the predefined splits."""

    ends_with_eos, is_single, n_bytes = True, False, None

    def __init__(self, hub: HubDataset) -> None:
        self._hub = hub
        self.left_out = Counter(hub.left_out)

    def identity(self) -> dict[str, Any]:
        hub = self._hub
        return {
            "kind": "hub",
            "name": hub.name,
            "config": hub.config,
            "column": hub.column,
            "splits": [split or "all" for split in hub.splits],
        }

    def parts(self) -> Iterator[DocumentPart]:
        self.left_out.clear()
        self.left_out.update(self._hub.left_out)
        position = 0
        for split in self._hub.splits:
            for row, text in self._hub.rows(split, self.left_out):
                for data, first, last in split_text(text):
                    position += len(data)
                    yield DocumentPart(f"{self._hub.name}/{split or 'all'}:{row}", data, first, last, split, position)
        if not position:
            raise _no_text(self._hub.name, self.left_out)


def _no_text(source: str, left_out: Counter[str]) -> UserError:
    return invalid(
        "SOURCE",
        source,
        f"a source with text in it (left out: {format_left_out(left_out) or 'nothing'})",
        "name files that contain text (a NUL byte in the first 8 KB counts as binary)",
    )


def _monotonic_position(before: int, size: int, tell: Callable[[], int]) -> Callable[[], int]:
    """Return a non-decreasing position in the input: a zip may be read out of order, and its table of contents is at the end."""
    furthest = before

    def position() -> int:
        nonlocal furthest
        furthest = max(furthest, before + min(tell(), size))
        return furthest

    return position


def _with_head(head: bytes, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Return a `read` that first returns the bytes already read."""
    ahead = io.BytesIO(head)
    return lambda n: ahead.read(n) or read(n)


def _printable(name: str) -> str:
    """Return a printable name, even if it is not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
