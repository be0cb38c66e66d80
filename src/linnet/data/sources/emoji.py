"""The built-in images: 3,786 emoji with captions, at 32 x 32 and 16 x 16.

They are split by concept, so that no variant of a held-out emoji is in the training split.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from linnet.core.errors import invalid

SIZES = (32, 16)
SHEET_COLUMNS = 64
FOLDER = Path(__file__).parents[1] / "emoji"
HELD_OUT = {"test": 5, "validation": 5}
"""Percent of the concepts."""
SALT = "emoji/"
"""Salt of the hash, chosen so that no concept is more than a fifth of a split (some have 104 images, most have one)."""

SKIN_TONES = re.compile(r",( (and )?\S+ skin tone)+")
PEOPLE = frozenset({"man", "men", "woman", "women", "person", "people", "boy", "girl", "child", "and"})
ONE_WORD = {
    "older": "old",
    "bride": "",
    **dict.fromkeys(("mermaid", "merman", "merperson"), "mer"),
    **dict.fromkeys(("prince", "princess"), "with crown"),
    **dict.fromkeys(("santa", "mrs", "mx"), ""),
}
"""Words that express gender or age of the same concept."""


def open_emoji(size: int) -> tuple[UInt8[np.ndarray, "n size size 3"], list[str], list[str]]:
    """Return the images, the caption of each, and the split of each, in the order of the sheet."""
    from PIL import Image

    if size not in SIZES:
        raise invalid("size of the emoji", size, f"one of {', '.join(map(str, SIZES))}", f"use {SIZES[0]}")
    captions: list[str] = json.loads((FOLDER / "captions.json").read_text())
    with Image.open(FOLDER / f"{size}.png") as image:
        sheet = np.asarray(image)
    cells = sheet.reshape(-1, size, SHEET_COLUMNS, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    images = cells[: len(captions)]  # the last row of the sheet is not full
    return images, captions, assign_splits(captions, images)


def find_concept(caption: str) -> str:
    """Return the concept shared by all variants in skin tone, gender and direction.

    `woman running facing right, dark skin tone` and `man running: sport, ...` are both `running`.
    """
    name = re.sub(r"\(.*?\)", "", caption.split(":")[0])
    name = SKIN_TONES.sub("", name).replace("facing right", "")
    words = [ONE_WORD.get(word, word) for word in name.replace(",", " ").split() if word not in PEOPLE]
    return " ".join(" ".join(words).split()) or "person"


def assign_splits(captions: Sequence[str], images: UInt8[np.ndarray, "n h w 3"]) -> list[str]:
    """Return the split of each image, by a hash of its concept.

    Concepts with the same image (the flags of France and of Clipperton Island) count as one.
    """
    concepts = [find_concept(caption) for caption in captions]
    first_concept: dict[bytes, str] = {}
    same_as: dict[str, str] = {}
    for name, image in zip(concepts, images, strict=True):
        first = _root(first_concept.setdefault(image.tobytes(), name), same_as)
        if _root(name, same_as) != first:
            same_as[_root(name, same_as)] = first
    return [_split(_root(name, same_as)) for name in concepts]


def _root(name: str, same_as: dict[str, str]) -> str:
    while name in same_as:
        name = same_as[name]
    return name


def _split(name: str) -> str:
    percent = int.from_bytes(hashlib.sha256((SALT + name).encode()).digest()[:8], "big") % 100
    for split, held_out in HELD_OUT.items():
        if percent < held_out:
            return split
        percent -= held_out
    return "train"
