"""Conversion between encoded images, pixel arrays and ids: decode an image to a square size, and encode PNGs."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int, UInt8

from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Accepted formats. Pillow's other readers run external programs (EPS) or are rarely used and tested."""
MAX_PIXELS = 1 << 27
"""Maximum pixels of an image before resizing: a file of a few bytes can claim any size."""
SHEET_GAP = 2
SHEET_GREY = 208
"""Neither white nor black, so that the edge of each image is visible."""
ORIENTATION_TAG = 0x0112


class BrokenImage(ValueError):
    """The bytes are not a usable image. `reason` is a key for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode_pixels(encoded: bytes, size: int) -> UInt8[np.ndarray, "size size 3"]:
    """Decode the centre square of an image, upright and composited over white.

    An image of this size is returned unchanged; any other is resized by area averaging.
    """
    if not encoded:
        raise BrokenImage("empty")
    try:
        with warnings.catch_warnings():
            # Pillow warns about unusual metadata; only whether the pixels can be read matters.
            warnings.simplefilter("ignore")
            return np.asarray(_square(_over_white(_upright(_open(encoded))), size))
    except BrokenImage:
        raise
    except Exception:
        # Damaged bytes make Pillow's readers raise almost anything: OSError, SyntaxError, struct.error, IndexError...
        raise BrokenImage("broken") from None


def to_png(image: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Encode one image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, "PNG", optimize=True)
    return file.getvalue()


def contact_sheet(images: UInt8[np.ndarray, "n h w 3"], columns: int, scale: int = 1) -> bytes:
    """Arrange all images row by row in one PNG, with each pixel scaled by `scale` and a grey line between images."""
    n, height, width, channels = images.shape
    assert n > 0, "a contact sheet needs images"
    assert columns > 0
    assert scale > 0
    columns = min(columns, n)
    rows = -(-n // columns)
    cell = np.full((rows * columns, height * scale + SHEET_GAP, width * scale + SHEET_GAP, channels), SHEET_GREY, "u1")
    cell[:n, SHEET_GAP:, SHEET_GAP:] = images.repeat(scale, axis=1).repeat(scale, axis=2)
    sheet = cell.reshape(rows, columns, *cell.shape[1:]).swapaxes(1, 2).reshape(-1, columns * cell.shape[2], channels)
    return to_png(np.pad(sheet, ((0, SHEET_GAP), (0, SHEET_GAP), (0, 0)), constant_values=SHEET_GREY))


def ids_to_pixels(ids: Int[np.ndarray, "*ids"], shape: Sequence[int]) -> tuple[UInt8[np.ndarray, "*shape"], int]:
    """Return pixels of this shape, and the number of ids that were not bytes (special or beyond the bytes); those become 0."""
    assert ids.size == math.prod(shape), f"{ids.size} ids for the shape {tuple(shape)}"
    is_byte = (ids >= FIRST_BYTE) & (ids < N_BYTE_IDS)
    values = np.where(is_byte, ids - FIRST_BYTE, 0).astype(np.uint8)
    return values.reshape(tuple(shape)), int(ids.size - is_byte.sum())


def _open(encoded: bytes) -> Image.Image:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise BrokenImage("not_a_picture") from None
    except Image.DecompressionBombError:
        raise BrokenImage("too_large") from None
    if image.width * image.height > MAX_PIXELS:
        raise BrokenImage("too_large")
    image.load()
    return image


def _upright(image: Image.Image) -> Image.Image:
    from PIL.Image import Transpose

    transpositions = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        orientation = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # as above: an image with damaged metadata is still usable
        return image
    return image.transpose(transpositions[orientation]) if orientation in transpositions else image


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16"):
        # Pillow would clip 16 bits to 255 instead of scaling them.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise BrokenImage("unknown_range")  # 32 bits per pixel: the value of white is unknown
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _square(image: Image.Image, size: int) -> Image.Image:
    from PIL.Image import Resampling

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    # At the same size this is a plain copy.
    return image.resize((size, size), Resampling.BOX, (left, top, left + side, top + side))
