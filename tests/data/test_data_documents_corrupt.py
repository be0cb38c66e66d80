"""Sources of text that are cut, altered, locked or empty: rejected in words that name the file, never with a traceback."""

from __future__ import annotations

import contextlib
import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from document_files import PACKERS, jsonl, parquet, read_all, rejection, tarred, write, zipped, zst

from linnet.core.errors import UserError
from linnet.data.sources import unpack_budget
from linnet.data.sources.documents import FileDocuments, open_documents


def broken_files() -> dict[str, bytes]:
    text = os.urandom(100_000).hex().encode()
    members = {"a.txt": text[:70_000], "b.txt": text[70_000:]}
    packed = {f"a.txt{codec}": pack(text) for codec, pack in PACKERS.items()}
    rows = [text[i : i + 1000].decode() for i in range(0, 200_000, 1000)]
    lines = gzip.compress(jsonl([{"text": row} for row in rows]))
    return packed | {
        "a.zip": zipped(members),
        "a.tar": tarred(members),
        "a.tar.zst": zst(tarred(members)),
        "a.parquet": parquet({"text": rows}),
        "a.jsonl.gz": lines,
    }


@pytest.mark.parametrize("name", broken_files())
def test_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    content = broken_files()[name]
    assert read_all(open_documents(write(tmp_path / name, content)))
    for keep in (5, len(content) // 3, len(content) - 600 if name == "a.tar" else len(content) - 3):
        if name == "a.tar":
            keep = min(keep, content.rindex(b"ustar") + 100)  # what comes after the last member may be missing
        message = rejection(write(tmp_path / name, content[:keep]))
        assert str(tmp_path / name) in message
    assert str(tmp_path / name) in rejection(write(tmp_path / name, b"this is no archive at all, but plain text" * 100))


@pytest.mark.parametrize("name", broken_files())
def test_flipped_byte_never_gives_a_traceback(tmp_path: Path, name: str) -> None:
    content = bytearray(broken_files()[name])
    for at in (0, 3, 8, 20, len(content) // 2, len(content) - 30, len(content) - 8):
        flipped = content.copy()
        flipped[at] ^= 0x55
        path = write(tmp_path / name, bytes(flipped))
        with contextlib.suppress(UserError):
            read_all(open_documents(path))


def test_footer_with_wrong_numbers_of_rows_is_rejected(tmp_path: Path) -> None:
    content = parquet({"text": [f"row {i}" for i in range(50)]})
    says: list[str] = []
    for at in [i for i, byte in enumerate(content) if byte == 100]:  # how a footer spells 50
        path = write(tmp_path / "a.parquet", content[:at] + bytes([90]) + content[at + 1 :])
        try:
            read_all(open_documents(path))
        except UserError as error:
            says.append(str(error))
    assert any("the row counts of its row groups do not add up" in message for message in says)


def test_encrypted_zip_is_rejected(tmp_path: Path) -> None:
    content = bytearray(zipped({"a.txt": b"secret"}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert "a.txt is encrypted" in rejection(write(tmp_path / "a.zip", bytes(content)))


def test_source_without_text_is_rejected(tmp_path: Path) -> None:
    assert "left out: 1 binary" in rejection(write(tmp_path / "a.gz", gzip.compress(b"\0")))
    assert "left out: 1 empty" in rejection(write(tmp_path / "b.zip", zipped({"x": b""})))
    assert "left out: 2 null rows" in rejection(write(tmp_path / "c.jsonl", jsonl([{"text": None}] * 2)))
    assert "left out: nothing" in rejection(write(tmp_path / "d.parquet", parquet({"text": pa.array([], pa.string())})))
    assert rejection(str(tmp_path / "nowhere")).startswith("SOURCE is ")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.zst", "a.zip", "a.tar.gz"])
def test_unpacked_size_is_bounded_and_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_budget, "FLOOR_BYTES", 1 << 20)
    text = b"the same line\n" * 300_000
    content = {"zip": lambda: zipped({"a.txt": text}), "gz": lambda: PACKERS[".gz"](tarred({"a.txt": text}))}
    packed = content[name.split(".")[-1]]() if name in ("a.zip", "a.tar.gz") else PACKERS[Path(name).suffix](text)
    source = write(tmp_path / name, packed)
    with pytest.raises(
        UserError, match=rf"{name} unpacks to more than .* 100 times .*allow more with --max-unpacked-gb"
    ):
        list(open_documents(source).parts())
    with pytest.raises(
        UserError, match=r"unpacks to more than 2,000,000 bytes, which is more than what --max-unpacked-gb"
    ):
        list(open_documents(source, max_unpacked_gb=0.002).parts())
    documents = open_documents(source, max_unpacked_gb=0.01)
    assert sum(len(part.data) for part in documents.parts()) == len(text)
    assert isinstance(documents, FileDocuments)
    assert len(text) <= documents.unpacked_bytes < len(text) + 20_000  # of a tar, with its headers
