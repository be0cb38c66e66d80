"""Files to read documents from, and what came of reading them, for the tests of `linnet.data.sources.documents`."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from linnet.core.errors import UserError
from linnet.data.sources import documents as documents_module
from linnet.data.sources.documents import Documents, open_documents

NOT_UTF8 = b"caf\xe9 \xff\xfe\xc3(\n"


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def jsonl(rows: Sequence[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(columns: dict[str, object], **options: object) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zst,
}


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def read_all(documents: Documents) -> list[tuple[str, bytes]]:
    """Name and content of each document, after checking that its parts are in order."""
    found: list[tuple[str, bytes]] = []
    position, open_name = 0, None
    for part in documents.parts():
        assert 0 < len(part.data) <= documents_module.PART_BYTES
        assert position <= part.position
        assert documents.n_bytes is None or part.position <= documents.n_bytes
        position = part.position
        assert part.first == (open_name is None)
        assert part.first or part.name == open_name
        if part.first:
            found.append((part.name, b""))
        found[-1] = (part.name, found[-1][1] + part.data)
        open_name = None if part.last else part.name
    assert open_name is None
    return found


def rejection(source: str, column: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        list(open_documents(source, column=column).parts())
    assert "Fix: " in str(caught.value)
    return str(caught.value)
