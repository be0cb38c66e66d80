"""What a source names, and what is said about bad ones before anything starts."""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.data.sources import files as source_module
from linnet.data.sources import text as text_module
from linnet.data.sources.files import find_files


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def names(source: Path | str) -> list[str]:
    return [f.name for f in find_files(str(source)).files]


def rejection(source: Path | str, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        load_dataset(DataConfig(source=str(source), **settings), 0)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def test_folder_is_walked_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"b", "a/z.md": b"z", "a/deep/er/c": b"c", "a.txt": b"a"})
    assert names(tmp_path) == ["a.txt", "a/deep/er/c", "a/z.md", "b.txt"]


def test_hidden_binary_and_empty_files_are_left_out_and_counted(tmp_path: Path) -> None:
    late_nul = b"x" * 9000 + b"\0"
    write(tmp_path, {".hidden": b"h", ".git/config": b"g", "image": b"PNG\0", "late": late_nul, "none": b"", "t": b"t"})
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    found = find_files(str(tmp_path))
    assert [f.name for f in found.files] == ["late", "t"]
    assert found.left_out == {"binary": 1, "empty": 1, "not_regular": 2}
    described = load_dataset(DataConfig(source=str(tmp_path)), 0).describe()
    assert described["left_out"]["source"] == found.left_out
    assert "Files left out of the source: 1 binary, 2 not regular." in described["warnings"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"data/a.txt": b"a", "elsewhere/b.txt": b"b"})
    (tmp_path / "data/again.txt").symlink_to(tmp_path / "data/a.txt")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    (tmp_path / "data/sub").mkdir()
    (tmp_path / "data/sub/b.txt").write_bytes(b"b")
    (tmp_path / "data/other").symlink_to(tmp_path / "data/sub")
    assert names(tmp_path / "data") == ["a.txt", "other/b.txt"]


def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"data/a.txt": b"a", "data/sub/b.txt": b"b", "elsewhere/secret.txt": b"s", "elsewhere/deep/c.txt": b"c"},
    )
    (tmp_path / "data/file.txt").symlink_to(tmp_path / "elsewhere/secret.txt")
    (tmp_path / "data/folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/sub/up.txt").symlink_to("../../elsewhere/secret.txt")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for source in (tmp_path / "data", tmp_path / "link"):
        found = find_files(str(source))
        assert [f.name for f in found.files] == ["a.txt", "sub/b.txt"]
        assert found.left_out == {"links_that_leave_the_folder": 3}
    found = find_files(str(tmp_path / "data/**/*.txt"))
    assert [f.name for f in found.files] == ["a.txt", "sub/b.txt"]
    assert found.left_out["links_that_leave_the_folder"] >= 2
    named = find_files(str(tmp_path / "data/file.txt"))
    assert [f.size for f in named.files] == [1], "a link that the user names is followed"
    (tmp_path / "data/sub/b.txt").unlink()
    with pytest.raises(UserError, match="name what the links point to"):
        find_files(str(tmp_path / "data/sub"))


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"x/a.txt": b"a", "x/y/b.txt": b"b", "x/y/c.md": b"c", "x/.h/d.txt": b"d", "x/[1].txt": b"1"})
    assert names(tmp_path / "x/*.txt") == ["[1].txt", "a.txt"]
    assert names(tmp_path / "x/**/*.txt") == ["[1].txt", "a.txt", "y/b.txt"]
    assert names(tmp_path / "**") == ["x/[1].txt", "x/a.txt", "x/y/b.txt", "x/y/c.md"]
    assert names(tmp_path / "x/[1].txt") == ["[1].txt"], "a name that exists is no pattern"
    monkeypatch.chdir(tmp_path)
    assert names("x/?.txt") == ["a.txt"]
    monkeypatch.setenv("HOME", str(tmp_path / "x"))
    assert names("~/y") == ["b.txt", "c.md"]
    assert names("~/y/*.md") == ["c.md"]


def test_byte_tokenizer_maps_bytes_to_ids(tmp_path: Path) -> None:
    content = bytes(range(1, 256)) + b"\xff\xfe\xc3("
    write(tmp_path, {"latin.txt": content})
    data = load_dataset(DataConfig(source=str(tmp_path / "latin.txt"), validation_fraction=0, test_fraction=0), 0)
    assert data.raw("train") == content
    assert data.train.n_tokens == len(content), "a single file has no end id"


def test_large_file_is_mapped_and_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"big.txt": bytes(np.random.default_rng(0).integers(1, 256, 5000, np.uint8))})
    cfg = DataConfig(source=str(tmp_path / "big.txt"), sequence_len=64, update_len=64)
    read = load_dataset(cfg, 0)
    monkeypatch.setattr(text_module, "MAP_FROM_BYTES", 1)
    mapped = load_dataset(cfg, 0)
    assert isinstance(mapped.validation._content, np.memmap)  # pyright: ignore[reportAttributeAccessIssue]
    assert not isinstance(read.validation._content, np.memmap)  # pyright: ignore[reportAttributeAccessIssue]
    assert mapped.describe() == read.describe()
    np.testing.assert_array_equal(mapped.batch(5).targets, read.batch(5).targets)
    (tmp_path / "big.txt").write_bytes(b"changed")
    assert load_dataset(cfg, 0).fingerprint != read.fingerprint


def test_standard_library_is_a_corpus() -> None:
    found = find_files("python-stdlib")
    assert found.n_bytes > 5_000_000
    assert [f.name for f in found.files] == sorted(f.name for f in found.files)
    folders = {part for f in found.files for part in Path(f.name).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert {"json/decoder.py", "asyncio/tasks.py"} <= {f.name for f in found.files}
    data = load_dataset(DataConfig(), 0)
    for split in (data.validation, data.test):
        assert 0.04 < split.n_bytes / found.n_bytes < 0.06
        assert split.n_documents > 5
    assert data.n_vocab == 259
    assert data.train.n_documents + data.validation.n_documents + data.test.n_documents == len(found.files)
    assert data.describe()["warnings"] == []


def test_python_without_source_text_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert "comes with its source files" in rejection("python-stdlib")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("corpsu.txt", "did you mean '{root}/corpus.txt'?"),
        ("nowhere/deeper/x.txt", "give its path with --data.source ('{root}' is the nearest folder"),
        ("python_stdlib", "did you mean 'python-stdlib'?"),
        ("corpus.txt/inside", "an existing file, folder or glob"),
        ("void", "matches at least one file"),
        ("*.nothing", "matches at least one file"),
        ("v*", "it matches folders only; use {root}/v*/**"),
        ("empty", "left out: 2 empty"),
        ("binary", "left out: 1 binary"),
        ("binary/archive.gz", "for archives, parquet and images run `linnet data prepare`"),
        ("nul\0character", "an existing file"),
    ],
)
def test_invalid_sources_are_rejected_with_the_fix(tmp_path: Path, source: str, says: str) -> None:
    write(tmp_path, {"corpus.txt": b"text", "empty/a": b"", "empty/b": b"", "binary/archive.gz": b"\x1f\x8b\0"})
    (tmp_path / "void").mkdir()
    message = rejection(tmp_path / source)
    assert says.format(root=tmp_path) in message
    assert message.startswith("data.source is ")
    assert "Fix: " in message


def test_empty_name_and_a_device_are_rejected(tmp_path: Path) -> None:
    assert "data.source is ''" in rejection("")
    assert "neither a file nor a folder" in rejection("/dev/null")
    write(tmp_path, {"a": b"a", "b": b"b"})
    assert "data.validation_files is ''" in rejection(tmp_path, validation_files=("",))


def test_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"open.txt": b"a", "locked.txt": b"b", "locked/c.txt": b"c"})

    def no_entry(path: object, *rest: object) -> object:
        if Path(str(path)).name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *rest)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(source_module, "open", no_entry, raising=False)
    assert f"{tmp_path}/locked.txt cannot be read (Permission denied)" in rejection(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become someone else for a moment")
def test_folder_that_cannot_be_entered_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = write(Path(folder), {"locked/c.txt": b"c", "open.txt": b"o"})
        root.chmod(0o755)
        (root / "locked").chmod(0o700)
        os.seteuid(65534)
        try:
            assert f"{root}/locked cannot be read (Permission denied)" in rejection(root)
            assert f"{root}/locked/c.txt cannot be read" in rejection(root / "locked/c.txt")
        finally:
            os.seteuid(0)


def test_file_that_shrinks_between_looking_and_reading_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.txt": b"long enough"})
    found = find_files(str(tmp_path / "a.txt"))
    write(tmp_path, {"a.txt": b"short"})
    monkeypatch.setattr("linnet.data.load.find_files", lambda source: found)
    assert "a.txt shrank" in rejection(tmp_path / "a.txt")
