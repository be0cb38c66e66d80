"""Pictures from every kind of source, in order and complete, with what is bad counted or refused; and their pixels."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from linnet.data import picture_readers
from linnet.data.pictures import looks_like_pictures, open_pictures
from linnet.data.pixels import BrokenPicture, contact_sheet, decode_pixels, pixels_of_ids, to_image
from linnet.errors import UserError
from linnet.tokens import FIRST_BYTE, N_BYTE_IDS


def png(seed: int, size: int = 8) -> bytes:
    return to_image(noise(seed, size))


def noise(seed: int, height: int = 8, width: int | None = None) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width or height, 3), np.uint8)


PICTURES = {f"{name}.png": png(i) for i, name in enumerate(("b/2", "a/1", "a/10", "c", "a/2"))}
IN_ORDER = ["a/1.png", "a/10.png", "a/2.png", "b/2.png", "c.png"]


def write_folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, data in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def contents(source: Path, **options: Any) -> list[tuple[str, bytes]]:
    return [(picture.name, picture.encoded) for picture in open_pictures(str(source), **options).pictures()]


# Sources


def test_a_folder_gives_its_pictures_by_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", PICTURES)
    assert contents(root) == [(name, PICTURES[name]) for name in IN_ORDER]


@pytest.mark.parametrize(("name", "write"), [("in.zip", write_zip), ("in.tar", write_tar)])
def test_an_archive_gives_its_members_by_name(
    tmp_path: Path, name: str, write: Callable[[Path, dict[str, bytes]], Path]
) -> None:
    path = write(tmp_path / name, PICTURES)
    assert contents(path) == [(f"{name}/{member}", PICTURES[member]) for member in IN_ORDER]


def test_a_glob_of_shards_and_a_single_picture(tmp_path: Path) -> None:
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


def test_the_members_of_a_tar_are_not_held(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "in.tar", {f"{i:04}.png": b"x" * 40 for i in range(300)})
    members = picture_readers._tar_members(path)
    held = [len(members.gi_frame.f_locals["archive"].members) for _ in members if members.gi_frame]  # pyright: ignore
    assert len(held) == 300
    assert max(held) <= 1


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
    source = open_pictures(str(path), column=None if column == "image" else column)
    found = list(source.pictures())
    assert [(p.name, p.encoded) for p in found] == KEPT
    assert source.left_out == {"null_rows": 1, "empty": 1}
    assert found[-1].position == source.n_bytes


def test_positions_grow_up_to_the_size_of_the_input(tmp_path: Path) -> None:
    write_folder(tmp_path, PICTURES)
    write_zip(tmp_path / "x.zip", PICTURES)
    write_tar(tmp_path / "y.tar", PICTURES)
    write_parquet(tmp_path / "z.parquet", {"image": list(PICTURES.values())})
    source = open_pictures(str(tmp_path))
    positions = [picture.position for picture in source.pictures()]
    assert len(positions) == 20
    assert all(before < after for before, after in itertools.pairwise(positions))
    assert positions[0] > 0
    assert positions[-1] == source.n_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())


def test_identity_tells_of_a_changed_input(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", PICTURES)
    before = open_pictures(str(root)).identity()
    assert open_pictures(str(root)).identity() == before
    assert str(tmp_path) not in str(before)
    os.utime(root / "c.png", ns=(1, 1))
    touched = open_pictures(str(root)).identity()
    assert touched != before
    (root / "c.png").rename(root / "d.png")
    assert open_pictures(str(root)).identity() != touched


# What is left out, and what is refused


def test_a_folder_counts_what_it_leaves_out(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {**PICTURES, "notes.txt": b"x", "d.png": b""})
    (root / "gone.png").symlink_to(root / "nowhere.png")
    (root / "zz.png").symlink_to(root / "c.png")
    os.mkfifo(root / "pipe.png")
    source = open_pictures(str(root))
    for _ in range(2):  # a second reading does not count twice
        assert [picture.name for picture in source.pictures()] == IN_ORDER
        assert source.left_out == {"not_a_picture": 1, "empty": 1, "not_regular": 2, "linked_twice": 1}


BAD_MEMBERS = {"notes.txt": b"x", "e.png": b"", "__MACOSX/c.png": b"x", "a/._1.png": b"x", "big.png": b"x" * 5000}
BAD_COUNTS = {"not_a_picture": 1, "empty": 1, "hidden": 2, "too_large": 1}


def test_a_zip_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_readers, "MAX_ENCODED_BYTES", 4000)
    path = write_zip(tmp_path / "in.zip", {"folder/": b"", **PICTURES, **BAD_MEMBERS, "broken.png": b"findme" * 9})
    path.write_bytes(path.read_bytes().replace(b"findme", b"fondue", 1))  # the checksum of one member is wrong now
    source = open_pictures(str(path))
    assert [p.name.removeprefix("in.zip/") for p in source.pictures()] == IN_ORDER
    assert source.left_out == {**BAD_COUNTS, "broken": 1}


def test_a_tar_counts_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_readers, "MAX_ENCODED_BYTES", 4000)
    path = write_tar(tmp_path / "in.tar", {**PICTURES, **BAD_MEMBERS})
    with tarfile.open(path, "a") as archive:
        folder, link = tarfile.TarInfo("folder"), tarfile.TarInfo("link.png")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "c.png"
        archive.addfile(folder)
        archive.addfile(link)
    source = open_pictures(str(path))
    assert [p.name.removeprefix("in.tar/") for p in source.pictures()] == IN_ORDER
    assert source.left_out == {**BAD_COUNTS, "not_regular": 1}


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "in.tar", PICTURES).read_bytes()
    with tarfile.open(tmp_path / "in.tar") as archive:
        headers = [info.offset for info in archive]
        end = archive.offset
    path = tmp_path / "cut.tar"
    # A cut just before a header is one that tarfile itself takes for the end.
    for n in (*headers[1:], end, *range(100, end, 317)):
        path.write_bytes(whole[:n])
        with pytest.raises(UserError, match="cut.tar is damaged or cut short"):
            list(open_pictures(str(path)).pictures())
    path.write_bytes(whole[: end + 512])
    assert len(contents(path)) == 5


def test_a_damaged_header_in_a_tar_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "in.tar", PICTURES)
    with tarfile.open(path) as archive:
        header = archive.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[header + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="in.tar is damaged"):
        list(open_pictures(str(path)).pictures())


def flipped(data: bytes, flips: list[tuple[float, int]]) -> bytes:
    damaged = bytearray(data)
    for where, value in flips:
        damaged[int(where * (len(damaged) - 1))] = value
    return bytes(damaged)


@pytest.mark.parametrize(("name", "write"), [("in.zip", write_zip), ("in.tar", write_tar)])
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_to_an_archive_gives_pictures_or_an_error_that_names_it(
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
def test_a_cut_zip_or_parquet_is_refused(tmp_path: Path, keep: float) -> None:
    write_zip(tmp_path / "in.zip", PICTURES)
    write_parquet(tmp_path / "in.parquet", {"image": list(PICTURES.values())})
    for path in (tmp_path / "in.zip", tmp_path / "in.parquet"):
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        with pytest.raises(UserError, match=f"{path.name} is damaged or cut short"):
            list(open_pictures(str(path)).pictures())


def test_parquet_columns_are_checked_before_work(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"jpg": [png(0)], "webp": [png(1)], "text": ["a"]})
    with pytest.raises(UserError, match="--column is 'image'.*jpg, webp"):
        open_pictures(str(path))
    with pytest.raises(UserError, match="--column is 'text'.*jpg, webp"):
        open_pictures(str(path), column="text")
    text = write_parquet(tmp_path / "text.parquet", {"text": ["a"]})
    with pytest.raises(UserError, match=r"none of its columns \(text\)"):
        open_pictures(str(text))


def test_sources_without_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SOURCE is .*existing"):
        open_pictures(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="left out: 1 not a picture"):
        open_pictures(str(tmp_path))
    for path in (write_zip(tmp_path / "in.zip", {"a.txt": b"x"}), write_tar(tmp_path / "in.tar", {"a.txt": b"x"})):
        with pytest.raises(UserError, match="left out: 1 not a picture"):
            list(open_pictures(str(path)).pictures())
    with pytest.raises(UserError, match="not compressed"):
        open_pictures(str(tmp_path / "in.tar.gz"))
    write_folder(tmp_path / "p", PICTURES)
    with pytest.raises(UserError, match="--column is 'image'"):
        open_pictures(str(tmp_path / "p"), column="image")


def test_what_looks_like_pictures(tmp_path: Path) -> None:
    captioned = {**PICTURES, **{name.replace(".png", ext): b"x" for name in PICTURES for ext in (".txt", ".json")}}
    few = {**{f"{i}.md": b"text" for i in range(9)}, "logo.png": png(0)}
    yes = [
        write_folder(tmp_path / "captioned", captioned),
        write_folder(tmp_path / "big", {f"{i}.JPEG": b"x" for i in range(3)}),
        write_zip(tmp_path / "yes.zip", PICTURES),
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
    assert [str(source) for source in yes if not looks_like_pictures(str(source))] == []
    assert [str(source) for source in (*no, tmp_path / "bad.zip") if looks_like_pictures(str(source))] == []


# Pixels


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_the_right_size_is_kept_pixel_for_pixel(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    np.testing.assert_array_equal(
        decode_pixels(encode(Image.fromarray(noise(1)), form, **options), 8),
        noise(1),
    )


@pytest.mark.parametrize(("height", "width", "crop"), [(8, 13, np.s_[:, 2:10]), (13, 8, np.s_[2:10])])
def test_the_middle_is_cut_out(height: int, width: int, crop: Any) -> None:
    pixels = noise(2, height, width)
    np.testing.assert_array_equal(decode_pixels(to_image(pixels), 8), pixels[crop])


def test_larger_pictures_become_the_mean_over_areas() -> None:
    pixels = noise(3, 32, 40)
    areas = pixels[:, 4:36].reshape(8, 4, 8, 4, 3).mean(axis=(1, 3))
    assert np.abs(decode_pixels(to_image(pixels), 8) - areas).max() <= 1
    assert decode_pixels(to_image(noise(4, 3)), 8).shape == (8, 8, 3)


def test_transparency_shows_white() -> None:
    colour, alpha = noise(5), np.zeros((8, 8, 1), np.uint8)
    alpha[:4], alpha[4:6] = 255, 128
    rgba = Image.fromarray(np.concatenate([colour, alpha], axis=2))
    pixels = decode_pixels(encode(rgba), 8)
    np.testing.assert_array_equal(pixels[:4], colour[:4])
    assert np.abs(pixels[4:6] - (colour[4:6] * (128 / 255) + 127)).max() <= 1
    assert (pixels[6:] == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert (decode_pixels(encode(palette), 8) == [40, 50, 60]).all()
    assert (decode_pixels(encode(palette, transparency=1), 8) == 255).all()


def test_grey_of_any_depth() -> None:
    wide = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    grey = (wide >> 8).astype(np.uint8)
    for image in (Image.fromarray(wide), Image.fromarray(grey)):
        np.testing.assert_array_equal(decode_pixels(encode(image), 8), grey[..., None].repeat(3, axis=2))
    assert (decode_pixels(encode(Image.new("1", (8, 8), 1)), 8) == 255).all()
    assert decode_pixels(encode(Image.new("CMYK", (8, 8)), "JPEG"), 8).min() > 250
    with pytest.raises(BrokenPicture) as caught:
        decode_pixels(encode(Image.new("F", (8, 8)), "TIFF"), 8)
    assert caught.value.reason == "unknown_range"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_camera_is_turned_upright(orientation: int) -> None:
    upright = noise(6)
    # How the standard stores each orientation: row 0 and column 0 of the file are these sides of the scene.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: upright.swapaxes(0, 1)[::-1],
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: upright.swapaxes(0, 1)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode_pixels(encode(Image.fromarray(stored), exif=exif), 8), upright)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "empty"),
        (b"plain text", "not_a_picture"),
        (encode(Image.new("RGB", (8, 8)), "EPS"), "not_a_picture"),  # Pillow would run a program for it
    ],
)
def test_what_is_no_picture_says_so(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenPicture) as caught:
        decode_pixels(encoded, 8)
    assert caught.value.reason == reason


def test_a_picture_that_claims_to_be_huge_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linnet.data.pixels.MAX_PIXELS", 99)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # beyond it Pillow only warns; twice that it refuses
    assert decode_pixels(png(0, 9), 8).shape == (8, 8, 3)
    for limit in (None, 30):  # Pillow's own limit refuses even earlier
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BrokenPicture, match="too_large"):
            decode_pixels(png(0, 10), 8)


def test_a_cut_picture_is_broken() -> None:
    for form in ("PNG", "JPEG", "GIF", "WEBP"):
        whole = encode(Image.fromarray(noise(7, 64)), form)
        with pytest.raises(BrokenPicture) as caught:
            decode_pixels(whole[: len(whole) // 2], 64)
        assert caught.value.reason in ("broken", "not_a_picture")


WHOLE = [encode(Image.fromarray(noise(8, 16)), form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM")]


@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8), st.floats(0, 1))
def test_any_damage_gives_pixels_or_a_broken_picture(whole: bytes, flips: list[tuple[float, int]], keep: float) -> None:
    damaged = flipped(whole, flips)
    with contextlib.suppress(BrokenPicture):
        assert decode_pixels(damaged[: int(keep * len(damaged))], 8).shape == (8, 8, 3)


# Back to pictures


def test_a_contact_sheet_shows_each_picture_in_its_place() -> None:
    pictures = np.stack([noise(i, 3, 5) for i in range(7)])
    with Image.open(io.BytesIO(contact_sheet(pictures, columns=3, scale=2))) as image:
        sheet = np.asarray(image)
    assert sheet.shape == (3 * (6 + 2) + 2, 3 * (10 + 2) + 2, 3)
    for i, picture in enumerate(pictures):
        top, left = 2 + i // 3 * 8, 2 + i % 3 * 12
        np.testing.assert_array_equal(sheet[top : top + 6 : 2, left : left + 10 : 2], picture)
        np.testing.assert_array_equal(sheet[top + 1 : top + 6 : 2, left + 1 : left + 10 : 2], picture)
        assert (sheet[top - 2 : top, left : left + 10] == sheet[0, 0]).all()
    assert (sheet[18:, 14:] == sheet[0, 0]).all(), "places without a picture"


@given(st.lists(st.integers(0, 70000), min_size=12, max_size=12))
def test_ids_become_pixels_and_others_are_counted(ids: list[int]) -> None:
    pixels, n_special = pixels_of_ids(np.array(ids, np.int32), (2, 2, 3))
    assert pixels.shape == (2, 2, 3)
    assert pixels.dtype == np.uint8
    bytes_ = [i - FIRST_BYTE if FIRST_BYTE <= i < N_BYTE_IDS else 0 for i in ids]
    assert pixels.ravel().tolist() == bytes_
    assert n_special == sum(not FIRST_BYTE <= i < N_BYTE_IDS for i in ids)


def test_every_pixel_value_comes_back() -> None:
    values = np.arange(256, dtype=np.uint8)
    pixels, n_special = pixels_of_ids(values.astype(np.int32) + FIRST_BYTE, (16, 16))
    np.testing.assert_array_equal(pixels.ravel(), values)
    assert n_special == 0
