"""Every source of text gives its documents byte for byte; what is broken is said with the file's name."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from document_files import NOT_UTF8, PACKERS, jsonl, parquet, read_all, tarred, write, zipped, zst

from linnet.data.sources import documents as documents_module
from linnet.data.sources.archives import detect_format
from linnet.data.sources.documents import DocumentPart, open_documents, split_stream

# Cutting


@hypothesis.given(st.binary(max_size=300), st.integers(4, 40), st.integers(1, 50))
def test_cut_keeps_every_byte(data: bytes, limit: int, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", limit)
        stream = io.BytesIO(data)
        parts = list(split_stream(lambda n: stream.read(min(n, at_once))))
    assert b"".join(part for part, _, _ in parts) == data
    assert all(0 < len(part) <= limit for part, _, _ in parts)
    assert [first for _, first, _ in parts] == [i == 0 for i in range(len(parts))]
    assert [last for _, _, last in parts] == [i == len(parts) - 1 for i in range(len(parts))]


@hypothesis.given(st.text(max_size=100), st.integers(4, 20))
def test_cut_never_divides_a_character(text: str, limit: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", limit)
        parts = [part for part, _, _ in split_stream(io.BytesIO(text.encode()).read)]
    assert "".join(part.decode() for part in parts) == text


def test_cut_prefers_the_end_of_a_line_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "PART_BYTES", 10)
    assert [part for part, _, _ in split_stream(io.BytesIO(b"ab\ncd\nefghijk").read)] == [b"ab\ncd\n", b"efghijk"]
    monkeypatch.setattr(documents_module, "NEWLINE_WITHIN", 3)
    assert [part for part, _, _ in split_stream(io.BytesIO(b"ab\ncd\nefghijk").read)] == [b"ab\ncd\nefgh", b"ijk"]


def test_long_file_comes_in_parts_of_bounded_size(tmp_path: Path) -> None:
    content = b"a line of text\n" * 600_000
    documents = open_documents(write(tmp_path / "long.txt", content))
    parts = list(documents.parts())
    assert len(parts) == 3
    assert all(part.data.endswith(b"\n") for part in parts)
    assert b"".join(part.data for part in parts) == content
    assert parts[-1].position == documents.n_bytes == len(content)


# Plain and packed text


def test_one_text_file_is_one_stream(tmp_path: Path) -> None:
    documents = open_documents(write(tmp_path / "a.txt", NOT_UTF8))
    assert (documents.is_single, documents.ends_with_eos) == (True, False)
    assert list(documents.parts()) == [DocumentPart("a.txt", NOT_UTF8, True, True, None, len(NOT_UTF8))]


@pytest.mark.parametrize("codec", PACKERS)
def test_packed_text_is_one_stream(tmp_path: Path, codec: str) -> None:
    content = NOT_UTF8 * 50_000
    documents = open_documents(write(tmp_path / f"a.txt{codec}", PACKERS[codec](content)))
    assert (documents.is_single, documents.ends_with_eos) == (True, False)
    assert read_all(documents) == [(f"a.txt{codec}", content)]
    twice = open_documents(write(tmp_path / f"twice{codec}", PACKERS[codec](b"one") + PACKERS[codec](b"two")))
    assert read_all(twice) == [(f"twice{codec}", b"onetwo")]


def test_folder_of_all_kinds(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"a",
        "b.txt.gz": gzip.compress(b"b"),
        "c.ZIP": zipped({"x/1.txt": b"c1", "2.txt.zst": zst(b"c2")}),
        "d.jsonl": jsonl([{"text": "d1"}, {"text": "d2"}]),
        "e.parquet": parquet({"text": ["e1"]}),
        "f.tgz": gzip.compress(tarred({"./1": b"f1"})),
        "g.png": b"\x89PNG\0",
        "h.txt": b"",
        "i.gz": gzip.compress(b"PNG\0"),
        "j.xz": lzma.compress(b""),
    }.items():
        write(tmp_path / name, content)
    documents = open_documents(str(tmp_path))
    assert (documents.is_single, documents.ends_with_eos) == (False, True)
    for _ in range(2):  # each reading counts anew
        assert read_all(documents) == [
            ("a.txt", b"a"),
            ("b.txt.gz", b"b"),
            ("c.ZIP/x/1.txt", b"c1"),
            ("c.ZIP/2.txt.zst", b"c2"),
            ("d.jsonl:1", b"d1"),
            ("d.jsonl:2", b"d2"),
            ("e.parquet:1", b"e1"),
            ("f.tgz/./1", b"f1"),
        ]
        assert documents.left_out == {"binary": 2, "empty": 2}
    assert [name for name, _ in read_all(open_documents(f"{tmp_path}/[ab]*"))] == ["a.txt", "b.txt.gz"]


@pytest.mark.parametrize(("name", "pack"), [("a.zip", zipped), ("a.tar", tarred)])
def test_members_are_documents(tmp_path: Path, name: str, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    members = {"b/2.txt": NOT_UTF8, "a.txt": b"first", ".hidden": b"h", "__MACOSX/a.txt": b"m", "none": b""}
    documents = open_documents(write(tmp_path / name, pack(members | {"x.png": b"\0", "in.zip": zipped({"y": b"y"})})))
    assert (documents.is_single, documents.ends_with_eos) == (False, True)
    assert read_all(documents) == [(f"{name}/b/2.txt", NOT_UTF8), (f"{name}/a.txt", b"first")]
    assert documents.left_out == {"hidden": 2, "empty": 1, "binary": 1, "packed_twice": 1}


def test_zip_of_one_text_is_one_stream(tmp_path: Path) -> None:
    assert open_documents(write(tmp_path / "a.zip", zipped({"enwik": b"text"}))).is_single
    assert not open_documents(write(tmp_path / "b.zip", zipped({"a.jsonl": jsonl([{"text": "x"}])}))).is_single


def test_progress_is_monotonic(tmp_path: Path) -> None:
    members = {f"{i}.txt": os.urandom(500).hex().encode() for i in range(20)}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.filelist.reverse()  # the table of contents in another order than the content
    write(tmp_path / "b.txt", b"b")
    documents = open_documents(str(tmp_path))
    write(tmp_path / "b.txt", b"b" * 500)  # grows after the look at it
    assert [name for name, _ in read_all(documents)] == [*(f"a.zip/{i}.txt" for i in reversed(range(20))), "b.txt"]


def test_links_in_a_tar_are_counted(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        archive.addfile(link)
        member = tarfile.TarInfo("a")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"a"))
    documents = open_documents(str(tmp_path / "a.tar"))
    assert read_all(documents) == [("a.tar/a", b"a")]
    assert documents.left_out == {"not_regular": 1}


def test_standard_library_is_documents() -> None:
    documents = open_documents("python-stdlib")
    part = next(documents.parts())
    assert part.name.endswith(".py")
    assert documents.ends_with_eos


def test_names_that_are_no_utf8_can_be_stored(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "d")
    for name in (b"caf\xe9.txt", b"b.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)).write_bytes(b"x")
    documents = open_documents(str(tmp_path / "d"))
    assert [name for name, _ in read_all(documents)] == ["b.txt", "caf\\xe9.txt"]
    json.dumps(documents.identity()).encode("ascii")


def test_identity_follows_the_input_and_the_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl([{"text": "a", "other": "b"}]))
    before = open_documents(path).identity()
    assert open_documents(path).identity() == before
    assert json.loads(json.dumps(before)) == before
    assert open_documents(path, column="other").identity() != before
    os.utime(path, ns=(1, 1))
    assert open_documents(path).identity() != before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.JSONL.GZ", ("jsonl", ".gz")),
        ("a.ndjson", ("jsonl", "")),
        ("a.tar.zst", ("tar", ".zst")),
        ("a.tgz", ("tar", ".gz")),
        ("a.zip", ("zip", "")),
        ("a.parquet", ("parquet", "")),
        ("a.json", ("text", "")),
        ("gz", ("text", "")),
    ],
)
def test_names_are_parsed(name: str, expected: tuple[str, str]) -> None:
    assert detect_format(name) == expected
