"""From encoded images to pixels and back: exact where it can be, and broken where it says so."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import flipped, noise, png
from PIL import Image

from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS
from linnet.data.images import BrokenImage, contact_sheet, decode_pixels, ids_to_pixels, to_png


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_right_size_is_kept_pixel_for_pixel(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    np.testing.assert_array_equal(
        decode_pixels(encode(Image.fromarray(noise(1)), form, **options), 8),
        noise(1),
    )


@pytest.mark.parametrize(("height", "width", "crop"), [(8, 13, np.s_[:, 2:10]), (13, 8, np.s_[2:10])])
def test_middle_is_cut_out(height: int, width: int, crop: Any) -> None:
    pixels = noise(2, height, width)
    np.testing.assert_array_equal(decode_pixels(to_png(pixels), 8), pixels[crop])


def test_larger_images_are_resized_by_area_mean() -> None:
    pixels = noise(3, 32, 40)
    areas = pixels[:, 4:36].reshape(8, 4, 8, 4, 3).mean(axis=(1, 3))
    assert np.abs(decode_pixels(to_png(pixels), 8) - areas).max() <= 1
    assert decode_pixels(to_png(noise(4, 3)), 8).shape == (8, 8, 3)


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
    with pytest.raises(BrokenImage) as caught:
        decode_pixels(encode(Image.new("F", (8, 8)), "TIFF"), 8)
    assert caught.value.reason == "unknown_range"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_orientation_is_applied(orientation: int) -> None:
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
def test_other_files_are_reported_as_no_image(encoded: bytes, reason: str) -> None:
    with pytest.raises(BrokenImage) as caught:
        decode_pixels(encoded, 8)
    assert caught.value.reason == reason


def test_image_that_claims_to_be_huge_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linnet.data.images.MAX_PIXELS", 99)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # beyond it Pillow only warns; twice that it rejects
    assert decode_pixels(png(0, 9), 8).shape == (8, 8, 3)
    for limit in (None, 30):  # Pillow's own limit rejects even earlier
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(BrokenImage, match="too_large"):
            decode_pixels(png(0, 10), 8)


def test_truncated_image_is_corrupt() -> None:
    for form in ("PNG", "JPEG", "GIF", "WEBP"):
        full = encode(Image.fromarray(noise(7, 64)), form)
        with pytest.raises(BrokenImage) as caught:
            decode_pixels(full[: len(full) // 2], 64)
        assert caught.value.reason in ("broken", "not_a_picture")


WHOLE = [encode(Image.fromarray(noise(8, 16)), form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM")]


@given(st.sampled_from(WHOLE), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8), st.floats(0, 1))
def test_any_corruption_gives_pixels_or_a_corrupt_image(
    full: bytes, flips: list[tuple[float, int]], keep: float
) -> None:
    damaged = flipped(full, flips)
    with contextlib.suppress(BrokenImage):
        assert decode_pixels(damaged[: int(keep * len(damaged))], 8).shape == (8, 8, 3)


# Back to images


def test_contact_sheet_shows_each_image_in_order() -> None:
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
    pixels, n_special = ids_to_pixels(np.array(ids, np.int32), (2, 2, 3))
    assert pixels.shape == (2, 2, 3)
    assert pixels.dtype == np.uint8
    bytes_ = [i - FIRST_BYTE if FIRST_BYTE <= i < N_BYTE_IDS else 0 for i in ids]
    assert pixels.ravel().tolist() == bytes_
    assert n_special == sum(not FIRST_BYTE <= i < N_BYTE_IDS for i in ids)


def test_every_pixel_value_comes_back() -> None:
    values = np.arange(256, dtype=np.uint8)
    pixels, n_special = ids_to_pixels(values.astype(np.int32) + FIRST_BYTE, (16, 16))
    np.testing.assert_array_equal(pixels.ravel(), values)
    assert n_special == 0
