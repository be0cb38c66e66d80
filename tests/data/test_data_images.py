"""Images from every kind of source, in order and complete, with what is bad counted or rejected."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import IMAGES, IN_ORDER, contents, flipped, png, write_folder, write_parquet, write_tar, write_zip

from linnet.core.errors import UserError
from linnet.data.sources import image_readers as picture_readers
from linnet.data.sources.images import contains_images, open_images

# Sources


def test_folder_gives_its_images_by_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", IMAGES)
    assert contents(root) == [(name, IMAGES[name]) for name in IN_ORDER]


@pytest.mark.parametrize(("name", "write"), [("in.zip", write_zip), ("in.tar", write_tar)])
def test_archive_gives_its_members_by_name(
    tmp_path: Path, name: str, write: Callable[[Path, dict[str, bytes]], Path]
) -> None:
    path = write(tmp_path / name, IMAGES)
    assert contents(path) == [(f"{name}/{member}", IMAGES[member]) for member in IN_ORDER]


def test_glob_of_shards_and_a_single_image(tmp_path: Path) -> None:
    for i in (2, 1):
        write_tar(tmp_path / f"shard-{i}.tar", {f"{i}.png": png(i), f"{i}.cls": b"7"})
    (tmp_path / "one.png").write_bytes(png(9))
    assert contents(tmp_path / "shard-*.tar") == [("shard-1.tar/1.png", png(1)), ("shard-2.tar/2.png", png(2))]
    assert contents(tmp_path / "one.png") == [("one.png", png(9))]
    assert [name for name, _ in contents(tmp_path)] == ["one.png", "shard-1.tar/1.png", "shard-2.tar/2.png"]


def test_long_names_in_a_tar(tmp_path: Path) -> None:
    names = ["x" * 300 + ".png", "é/" * 80 + "y.PNG"]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "in.tar", "w", format=form) as archive:
            for i, name in enumerate(names):
                info = tarfile.TarInfo(name)
                info.size = len(png(i))
                archive.addfile(info, io.BytesIO(png(i)))
        assert contents(tmp_path / "in.tar") == [(f"in.tar/{name}", png(i)) for i, name in enumerate(names)]


def test_tar_members_are_not_kept_in_memory(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "in.tar", {f"{i:04}.png": b"x" * 40 for i in range(300)})
    members = picture_readers.tar_members(path)
    stored = [len(members.gi_frame.f_locals["archive"].members) for _ in members if members.gi_frame]  # pyright: ignore
    assert len(stored) == 300
    assert max(stored) <= 1


ROWS = [png(0), None, b"", png(1), png(2), png(3), png(4)]
KEPT = [(f"in.parquet:{row:09}", ROWS[row]) for row in (0, 3, 4, 5, 6)]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("image", pa.array(ROWS, pa.binary())),
        ("image", pa.array(ROWS, pa.large_binary())),
        ("image", pa.array([{"bytes": row, "path": "p"} for row in ROWS])),
        ("image", pa.array([{"path": "p", "bytes": row} if row is not None else None for row in ROWS])),
        ("picture", pa.array(ROWS, pa.binary())),
    ],
    ids=["binary", "large", "struct", "null_struct", "named"],
)
def test_parquet(tmp_path: Path, column: str, values: pa.Array) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"label": list(range(len(ROWS))), column: values})
    source = open_images(str(path), column=None if column == "image" else column)
    found = list(source.images())
    assert [(p.name, p.encoded) for p in found] == KEPT
    assert source.left_out == {"null_rows": 1, "empty": 1}
    assert found[-1].position == source.n_bytes


def test_positions_grow_up_to_the_size_of_the_input(tmp_path: Path) -> None:
    write_folder(tmp_path, IMAGES)
    write_zip(tmp_path / "x.zip", IMAGES)
    write_tar(tmp_path / "y.tar", IMAGES)
    write_parquet(tmp_path / "z.parquet", {"image": list(IMAGES.values())})
    source = open_images(str(tmp_path))
    positions = [picture.position for picture in source.images()]
    assert len(positions) == 20
    assert all(before < after for before, after in itertools.pairwise(positions))
    assert positions[0] > 0
    assert positions[-1] == source.n_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())


def test_identity_changes_with_the_input(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", IMAGES)
    before = open_images(str(root)).identity()
    assert open_images(str(root)).identity() == before
    assert str(tmp_path) not in str(before)
    os.utime(root / "c.png", ns=(1, 1))
    touched = open_images(str(root)).identity()
    assert touched != before
    (root / "c.png").rename(root / "d.png")
    assert open_images(str(root)).identity() != touched


# What is left out, and what is rejected


def test_folder_counts_what_it_leaves_out(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {**IMAGES, "notes.txt": b"x", "d.png": b""})
    (root / "gone.png").symlink_to(root / "nowhere.png")
    (root / "zz.png").symlink_to(root / "c.png")
    os.mkfifo(root / "pipe.png")
    source = open_images(str(root))
    for _ in range(2):  # a second reading does not count twice
        assert [picture.name for picture in source.images()] == IN_ORDER
        assert source.left_out == {"not_a_picture": 1, "empty": 1, "not_regular": 2, "linked_twice": 1}


BAD_MEMBERS = {"notes.txt": b"x", "e.png": b"", "__MACOSX/c.png": b"x", "a/._1.png": b"x", "big.png": b"x" * 5000}
BAD_COUNTS = {"not_a_picture": 1, "empty": 1, "hidden": 2, "too_large": 1}


def test_zip_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_readers, "MAX_ENCODED_BYTES", 4000)
    path = write_zip(tmp_path / "in.zip", {"folder/": b"", **IMAGES, **BAD_MEMBERS, "broken.png": b"findme" * 9})
    path.write_bytes(path.read_bytes().replace(b"findme", b"fondue", 1))  # the checksum of one member is wrong now
    source = open_images(str(path))
    assert [p.name.removeprefix("in.zip/") for p in source.images()] == IN_ORDER
    assert source.left_out == {**BAD_COUNTS, "broken": 1}


def test_tar_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_readers, "MAX_ENCODED_BYTES", 4000)
    path = write_tar(tmp_path / "in.tar", {**IMAGES, **BAD_MEMBERS})
    with tarfile.open(path, "a") as archive:
        folder, link = tarfile.TarInfo("folder"), tarfile.TarInfo("link.png")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "c.png"
        archive.addfile(folder)
        archive.addfile(link)
    source = open_images(str(path))
    assert [p.name.removeprefix("in.tar/") for p in source.images()] == IN_ORDER
    assert source.left_out == {**BAD_COUNTS, "not_regular": 1}


def test_tar_cut_anywhere_is_rejected(tmp_path: Path) -> None:
    full = write_tar(tmp_path / "in.tar", IMAGES).read_bytes()
    with tarfile.open(tmp_path / "in.tar") as archive:
        headers = [info.offset for info in archive]
        end = archive.offset
    path = tmp_path / "cut.tar"
    # A cut just before a header is one that tarfile itself takes for the end.
    for n in (*headers[1:], end, *range(100, end, 317)):
        path.write_bytes(full[:n])
        with pytest.raises(UserError, match="cut.tar is corrupt or truncated"):
            list(open_images(str(path)).images())
    path.write_bytes(full[: end + 512])
    assert len(contents(path)) == 5


def test_corrupt_header_in_a_tar_is_rejected(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "in.tar", IMAGES)
    with tarfile.open(path) as archive:
        header = archive.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[header + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="in.tar is corrupt"):
        list(open_images(str(path)).images())


@pytest.mark.parametrize(("name", "write"), [("in.zip", write_zip), ("in.tar", write_tar)])
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_corruption_of_an_archive_gives_images_or_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    write: Callable[[Path, dict[str, bytes]], Path],
    flips: list[tuple[float, int]],
) -> None:
    path = write(tmp_path_factory.mktemp("damaged") / name, {f"{i}.png": b"%d" % i for i in range(9)})
    path.write_bytes(flipped(path.read_bytes(), flips))
    try:
        found = contents(path)
    except UserError as error:
        assert name in str(error)  # noqa: PT017
    else:
        assert 0 < len(found) <= 9


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.98])
def test_truncated_zip_or_parquet_is_rejected(tmp_path: Path, keep: float) -> None:
    write_zip(tmp_path / "in.zip", IMAGES)
    write_parquet(tmp_path / "in.parquet", {"image": list(IMAGES.values())})
    for name, message in (("in.zip", "is corrupt or truncated"), ("in.parquet", "is not a complete parquet file")):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        with pytest.raises(UserError, match=f"{name} {message}"):
            list(open_images(str(path)).images())


def test_parquet_columns_are_checked_before_work(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"jpg": [png(0)], "webp": [png(1)], "text": ["a"]})
    with pytest.raises(UserError, match="--column is 'image'.*jpg, webp"):
        open_images(str(path))
    with pytest.raises(UserError, match="--column is 'text'.*jpg, webp"):
        open_images(str(path), column="text")
    text = write_parquet(tmp_path / "text.parquet", {"text": ["a"]})
    with pytest.raises(UserError, match=r"none of its columns \(text\)"):
        open_images(str(text))


def test_sources_without_images_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SOURCE is .*existing"):
        open_images(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="left out: 1 not a picture"):
        open_images(str(tmp_path))
    for path in (write_zip(tmp_path / "in.zip", {"a.txt": b"x"}), write_tar(tmp_path / "in.tar", {"a.txt": b"x"})):
        with pytest.raises(UserError, match="left out: 1 not a picture"):
            list(open_images(str(path)).images())
    with pytest.raises(UserError, match="an uncompressed tar"):
        open_images(str(tmp_path / "in.tar.gz"))
    write_folder(tmp_path / "p", IMAGES)
    with pytest.raises(UserError, match="--column is 'image'"):
        open_images(str(tmp_path / "p"), column="image")


def test_sources_that_look_like_images(tmp_path: Path) -> None:
    captioned = {**IMAGES, **{name.replace(".png", ext): b"x" for name in IMAGES for ext in (".txt", ".json")}}
    few = {**{f"{i}.md": b"text" for i in range(9)}, "logo.png": png(0)}
    yes = [
        write_folder(tmp_path / "captioned", captioned),
        write_folder(tmp_path / "big", {f"{i}.JPEG": b"x" for i in range(3)}),
        write_zip(tmp_path / "yes.zip", IMAGES),
        write_tar(tmp_path / "yes.tar", {"a.txt": b"x"}),
        write_parquet(tmp_path / "yes.parquet", {"image": [png(0)], "text": ["x"]}),
        write_parquet(tmp_path / "struct.parquet", {"img": [{"bytes": png(0), "path": None}]}),
        tmp_path / "big" / "1.JPEG",
        tmp_path / "some.tar.gz",
    ]
    no = [
        write_folder(tmp_path / "few", few),
        write_zip(tmp_path / "no.zip", few),
        write_parquet(tmp_path / "no.parquet", {"text": [b"x"]}),
        tmp_path / "few" / "1.md",
        tmp_path / "nowhere",
        "hf:owner/name",
        "enwik8",
        "",
    ]
    (tmp_path / "bad.zip").write_bytes(b"PK\x03\x04")
    assert [str(source) for source in yes if not contains_images(str(source))] == []
    assert [str(source) for source in (*no, tmp_path / "bad.zip") if contains_images(str(source))] == []
