"""The named sets: proven by content, cut exactly at their splits, from what the user has or fetched."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import urllib.parse
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linnet.core.errors import UserError
from linnet.data.sources import catalog as named_module
from linnet.data.sources import documents as documents_module
from linnet.data.sources.catalog import (
    BENCHMARKS,
    ENWIK8,
    BenchmarkDocuments,
    BenchmarkText,
    ImageNet64,
    open_benchmark,
)
from linnet.data.sources.documents import FileDocuments
from linnet.data.sources.files import find_files

TEXT = b"".join(b"line %d of a small encyclopedia\n" % i for i in range(400))
BOOKS = {
    "train/1.txt": b"one\n",
    "train/20.txt": b"twenty\n",
    "validation/3.txt": b"three\n",
    "test/4.txt": b"four\n",
    "metadata.csv": b"id,title\n",
    "train/notes.md": b"not a book\n",
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> BenchmarkText:
    """A small set in the place of enwik8, with splits that fall inside lines and inside parts."""
    test = len(TEXT) - 9001 - 777
    stream = BenchmarkText(
        name="enwik8",
        url=ENWIK8.url,
        sha256=hashlib.sha256(TEXT).hexdigest(),
        sizes={"train": 9001, "validation": 777, "test": test},
    )
    monkeypatch.setattr(named_module, "ENWIK8", stream)
    monkeypatch.setattr(documents_module, "PART_BYTES", 1000)
    return stream


def pack(name: str, folder: Path, content: bytes = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("readme", b"other")
            archive.writestr("enwik8", content)
    else:
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def no_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(named_module, "download_file", fail)
    monkeypatch.setattr(named_module, "read_url", fail)


def rejection(name: str, from_path: Path | None, cache: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_benchmark(name, from_path, cache)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def test_facts_of_each_benchmark_dataset() -> None:
    assert list(BENCHMARKS) == ["enwik8", "pg19", "imagenet64"]
    assert ENWIK8.n_bytes == 100_000_000
    assert list(ENWIK8.sizes.values()) == [90_000_000, 5_000_000, 5_000_000]
    assert {name: s.kind for name, s in BENCHMARKS.items()} == {
        "enwik8": "text",
        "pg19": "text",
        "imagenet64": "images",
    }


@pytest.mark.parametrize("name", ["enwik8", "enwik8.zip", "enwik8.gz"])
@pytest.mark.parametrize("by", ["file", "folder", "cache"])
def test_enwik8_is_split_at_its_published_offsets(
    small: BenchmarkText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by: str
) -> None:
    no_fetch(monkeypatch)
    path = pack(name, tmp_path / "have")
    from_path = {"file": path, "folder": path.parent, "cache": None}[by]
    documents = open_benchmark("enwik8", from_path, path.parent if by == "cache" else tmp_path / "cache")
    assert isinstance(documents, BenchmarkDocuments)
    assert (documents.ends_with_eos, documents.is_single, documents.n_bytes) == (False, True, path.stat().st_size)
    parts = list(documents.parts())
    start = 0
    for split, size in small.sizes.items():
        mine = [part for part in parts if part.split == split]
        assert b"".join(part.data for part in mine) == TEXT[start : start + size]
        assert [part.first for part in mine] == [True] + [False] * (len(mine) - 1)
        assert [part.last for part in mine] == [False] * (len(mine) - 1) + [True]
        start += size
    assert start == len(TEXT)
    order: list[str | None] = list(small.sizes)
    assert [part.split for part in parts] == sorted((p.split for p in parts), key=order.index)
    assert [part.position for part in parts] == sorted(part.position for part in parts)
    assert json.loads(json.dumps(documents.identity())) == documents.identity()


def test_enwik8_is_fetched_into_the_cache(
    small: BenchmarkText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []

    def fetch(url: str, path: Path, **_: object) -> Path:
        requested.append(url)
        return pack(path.name, path.parent)

    monkeypatch.setattr(named_module, "download_file", fetch)
    open_benchmark("enwik8", None, tmp_path / "cache")
    open_benchmark("enwik8", None, tmp_path / "cache")
    assert requested == [small.url]


def test_another_text_is_not_enwik8(small: BenchmarkText, tmp_path: Path) -> None:
    path = pack("enwik8", tmp_path, TEXT[:-1] + b"!")
    message = rejection("enwik8", path, tmp_path)
    assert f"{path} is not enwik8" in message
    assert small.sha256 in message
    assert "is not enwik8: it has 5 bytes" in rejection("enwik8", pack("enwik8.gz", tmp_path / "g", TEXT[:5]), tmp_path)
    (tmp_path / "void").mkdir()
    assert "enwik8, enwik8.zip or enwik8.gz" in rejection("enwik8", tmp_path / "void", tmp_path)
    assert "--from is" in rejection("enwik8", tmp_path / "nowhere", tmp_path)
    complete = pack("enwik8.zip", tmp_path / "z").read_bytes()
    (tmp_path / "enwik8.zip").write_bytes(complete[:-500])
    assert "enwik8.zip is corrupt or truncated, and cannot be unpacked" in rejection(
        "enwik8", tmp_path / "enwik8.zip", tmp_path
    )
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("text8", TEXT)
    assert "does not contain enwik8" in rejection("enwik8", tmp_path / "other.zip", tmp_path)
    assert "enwik8, pg19, imagenet64" in rejection("enwik9", None, tmp_path)


def write_books(folder: Path) -> Path:
    for name, content in BOOKS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar_books(path: Path, top: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in BOOKS.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zip_splits(folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "validation", "test"):
        with zipfile.ZipFile(folder / f"{split}.zip", "w") as archive:
            for name, content in BOOKS.items():
                if name.startswith(split):
                    archive.writestr(name.removeprefix(f"{split}/"), content)
    return folder


def check_books(documents: object) -> Counter[str]:
    assert isinstance(documents, FileDocuments)
    assert (documents.ends_with_eos, documents.is_single) == (True, False)
    found = {(part.split, part.data) for part in documents.parts()}
    assert found == {
        ("train", b"one\n"),
        ("train", b"twenty\n"),
        ("validation", b"three\n"),
        ("test", b"four\n"),
    }
    return documents.left_out


def test_pg19_from_a_folder_or_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_fetch(monkeypatch)
    sources = [
        write_books(tmp_path / "pg19"),
        tar_books(tmp_path / "pg19.tar.gz", ""),
        tar_books(tmp_path / "books.tgz", "deepmind/pg19/"),
    ]
    for source in sources:
        assert check_books(open_benchmark("pg19", source, tmp_path)) == {"outside_splits": 2}
    assert check_books(open_benchmark("pg19", zip_splits(tmp_path / "zips"), tmp_path)) == {"outside_splits": 1}
    assert "train/, validation/ and test/" in rejection("pg19", tmp_path / "pg19/train", tmp_path)


def test_pg19_is_fetched_with_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def listing(url: str, instead: str) -> bytes:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
        items = [
            {"name": n, "size": str(len(c)), "md5Hash": base64.b64encode(hashlib.md5(c).digest()).decode()}
            for n, c in BOOKS.items()
            if n.startswith(query["prefix"])
        ]
        at = int(query.get("pageToken", "0"))  # one item a page
        more = {"nextPageToken": str(at + 1)} if at + 1 < len(items) else {}
        return json.dumps({"items": items[at : at + 1]} | more).encode()

    def fetch(url: str, path: Path, *, md5: str, size: int) -> Path:
        name = url.removeprefix(named_module.BUCKET_FILES)
        fetched.append(name)
        assert (md5, size) == (hashlib.md5(BOOKS[name]).hexdigest(), len(BOOKS[name]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BOOKS[name])
        return path

    monkeypatch.setattr(named_module, "read_url", listing)
    monkeypatch.setattr(named_module, "download_file", fetch)
    seen: list[tuple[int, int | None]] = []
    documents = open_benchmark("pg19", None, tmp_path, lambda *done: seen.append(done))
    assert check_books(documents) == {}
    books = sorted(name for name in BOOKS if name.endswith(".txt"))
    assert sorted(fetched) == books
    assert seen[-1] == (sum(len(BOOKS[name]) for name in books),) * 2
    open_benchmark("pg19", None, tmp_path)
    assert sorted(fetched) == books, "what is there is not fetched again"
    monkeypatch.setattr(named_module, "read_url", lambda url, instead: b"<html>")
    assert "did not return a listing" in rejection("pg19", None, tmp_path)


def test_pg19_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str, instead: str) -> bytes:
        raise UserError(f"{url} cannot be fetched. Fix: {instead}.")

    monkeypatch.setattr(named_module, "read_url", unreachable)
    message = rejection("pg19", None, tmp_path)
    assert named_module.BUCKET_FILES in message
    assert "--from" in message


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 64, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def tar_pictures(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for i, name in enumerate(names):
            content = png(i)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_imagenet64_divides_its_training_file_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_fetch(monkeypatch)
    monkeypatch.setattr(named_module, "IMAGENET64_TRAIN", 2)
    tar_pictures(tmp_path / "train_64x64.tar", ["train_64x64/3.png", "train_64x64/1.png", "train_64x64/2.png"])
    assert "valid_64x64.tar is missing" in rejection("imagenet64", tmp_path, tmp_path)
    tar_pictures(tmp_path / "valid_64x64.tar", ["valid_64x64/1.png"])
    for from_path in (tmp_path, tmp_path / "train_64x64.tar"):
        pictures = open_benchmark("imagenet64", from_path, tmp_path / "cache")
        assert isinstance(pictures, ImageNet64)
        found = list(pictures.images())
        assert [(p.split, p.encoded) for p in found] == [
            ("train", png(1)),
            ("train", png(2)),
            ("validation", png(0)),
            ("test", png(0)),
        ]
        assert [p.position for p in found] == sorted(p.position for p in found)
        n_bytes = sum(p.stat().st_size for p in tmp_path.glob("*.tar"))
        assert pictures.n_bytes == n_bytes
        assert found[-1].position <= n_bytes
        assert len({p.name for p in found}) == 4
        json.dumps(pictures.identity())


def test_imagenet64_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def fetch(url: str, path: Path, **_: object) -> Path:
        requested.append(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        tar_pictures(path, [f"{path.stem}/1.png"])
        return path

    monkeypatch.setattr(named_module, "download_file", fetch)
    pictures = open_benchmark("imagenet64", None, tmp_path)
    assert isinstance(pictures, ImageNet64)
    assert [p.split for p in pictures.images()] == ["train", "test"]
    assert requested == [f"https://image-net.org/small/{name}_64x64.tar" for name in ("train", "valid")]


def test_find_lists_packed_files_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.GZ").write_bytes(b"\x1f\x8b\0")
    (tmp_path / "b.txt").write_bytes(b"b")
    assert [f.name for f in find_files(str(tmp_path)).files] == ["b.txt"]
    assert [f.name for f in find_files(str(tmp_path), "SOURCE", (".gz",)).files] == ["a.GZ", "b.txt"]
