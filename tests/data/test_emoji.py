"""The embedded emoji: the right images under the right captions, and no variant of a held-out one in training."""

from __future__ import annotations

import hashlib
import json
import runpy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linnet.core.errors import UserError
from linnet.data.sources.emoji import FOLDER, SIZES, assign_splits, find_concept, open_emoji


@pytest.mark.parametrize("size", SIZES)
def test_every_emoji_has_a_caption_a_split_and_an_image(size: int) -> None:
    images, captions, splits = open_emoji(size)
    assert images.shape == (3786, size, size, 3)
    assert images.dtype == np.uint8
    assert len(captions) == len(splits) == 3786
    assert not (images == 255).all(axis=(1, 2, 3)).any(), "an empty cell of the sheet"
    assert len({hashlib.sha256(image.tobytes()).digest() for image in images}) == 3767


def test_sizes_show_the_same() -> None:
    large, small = (open_emoji(size)[0].astype(float) for size in SIZES)
    halved = large.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4))
    # Both were rounded once, from the same larger image.
    assert np.abs(halved - small).max() <= 1


def test_captions_name_what_is_seen() -> None:
    images, captions, _ = open_emoji(32)
    by_name = {caption.split(":")[0]: image for caption, image in zip(captions, images, strict=True)}
    centres = {
        name: by_name[name][12:20, 12:20].mean(axis=(0, 1)) for name in ("red heart", "green heart", "blue heart")
    }
    assert [int(centre.argmax()) for centre in centres.values()] == [0, 1, 2]
    left, middle, right = (by_name["flag france"][16, x].astype(int) for x in (6, 16, 26))
    assert left[2] > left[0]
    assert middle.min() > 200
    assert right[0] > right[2]


@pytest.mark.parametrize(
    ("caption", "is_about"),
    [
        ("woman running facing right, medium-dark skin tone", "running"),
        ("man running: sport, walk (person activity)", "running"),
        ("couple with heart man man, light skin tone and dark skin tone", "couple with heart"),
        ("woman, dark skin tone", "person"),
        ("boy: man, male", "person"),
        ("santa claus, light skin tone", "claus"),
        ("mrs claus: christmas", "claus"),
        ("two thirty: 2:30, 230, 14:30, 1430, time (time)", "two thirty"),
        ("flag diego garcia (country flag)", "flag diego garcia"),
        ("waning crescent moon", "waning crescent moon"),
    ],
)
def test_concepts(caption: str, is_about: str) -> None:
    assert find_concept(caption) == is_about


def test_no_concept_and_no_image_is_in_two_splits() -> None:
    images, captions, splits = open_emoji(16)
    for keys in ([find_concept(caption) for caption in captions], [image.tobytes() for image in images]):
        assert len(set(zip(keys, splits, strict=True))) == len(set(keys))
    # No skin tone is left over as a concept of its own.
    assert not [c for c in map(find_concept, captions) if "skin tone" in c]
    assert open_emoji(32)[2] == splits


def test_same_image_joins_concepts_even_through_a_third() -> None:
    a, b = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    names = [f"thing {i}" for i in range(60)]
    alone = assign_splits(names, np.arange(60, dtype=np.uint8).reshape(60, 1, 1, 1).repeat(3, axis=3))
    assert len(set(alone)) == 3, "60 names of which none is held out would test nothing"
    # Each name stands once with image a and once with image b, so all are one.
    assert len(set(assign_splits([*names, *names], np.stack([a] * 60 + [b] * 60)))) == 1


def test_splits_are_close_to_the_requested_fractions() -> None:
    _, captions, splits = open_emoji(16)
    images, concepts = Counter(splits), Counter(dict(zip(map(find_concept, captions), splits, strict=True)).values())
    for split in ("validation", "test"):
        assert 0.04 < images[split] / 3786 < 0.06
        assert 0.04 < concepts[split] / concepts.total() < 0.06
        largest = Counter(find_concept(c) for c, s in zip(captions, splits, strict=True) if s == split).most_common(1)[
            0
        ][1]
        assert largest <= images[split] / 5


def test_another_size_is_rejected() -> None:
    with pytest.raises(UserError, match="size of the emoji is 64.*one of 32, 16"):
        open_emoji(64)


def test_package_carries_the_licence_and_stays_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {"32.png", "16.png", "captions.json", "LICENSE", "NOTICE"}
    assert sum(files.values()) < 6_000_000
    assert "Apache License" in (FOLDER / "LICENSE").read_text()
    assert "Noto Emoji" in (FOLDER / "NOTICE").read_text()
    assert len(json.loads((FOLDER / "captions.json").read_text())) == 3786


def test_sheets_can_be_made_again(tmp_path: Path) -> None:
    pack = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "pack_emoji.py"))["pack"]
    cells = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 64, 3), np.uint8)  # 2 rows of 64 images
    Image.fromarray(cells.swapaxes(1, 2).reshape(128, 4096, 3)).save(tmp_path / "sheet.png")
    (tmp_path / "captions.json").write_text(json.dumps(["a caption"] * 100))
    pack(tmp_path / "sheet.png", tmp_path / "captions.json", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "captions.json").read_text()) == ["a caption"] * 100
    with Image.open(tmp_path / "out" / "16.png") as sheet:
        last = np.asarray(sheet)[16:32, 35 * 16 : 36 * 16]
    assert np.abs(last - cells[1, 35].reshape(16, 4, 16, 4, 3).mean(axis=(1, 3))).max() <= 1
    (tmp_path / "captions.json").write_text(json.dumps(["a caption"] * 200))
    with pytest.raises(SystemExit, match="not 64 x 4 images"):
        pack(tmp_path / "sheet.png", tmp_path / "captions.json", tmp_path / "out")
