"""Images and embeddings of the Python API: what `linnet sample` writes, shown inline, the same alone and in a list."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import linnet
from linnet.cli import main

MADE = Path(__file__).parents[1] / "goldens" / "runs_0_1"
PAIRS = MADE / "pairs"


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        main([*arguments, "--json"])
    assert not exit.value.code
    return json.loads(out.getvalue())


def pixels(file: str | Path) -> np.ndarray:
    return np.asarray(Image.open(file))


@pytest.fixture(scope="module")
def painter() -> linnet.Run:
    return linnet.load(MADE / "pixels")


@pytest.fixture(scope="module")
def prior() -> linnet.Run:
    return linnet.load(MADE / "prior")


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """Two texts, encoded."""
    return {
        "embeddings": np.load(PAIRS / "text_emb" / "text_emb_0.npy")[40:42].astype(np.float32),
        "text_encodings": np.load(PAIRS / "text_encodings" / "text_encodings_0.npy")[40:42].astype(np.float32),
    }


def test_images_are_those_of_the_command(painter: linnet.Run, tmp_path: Path) -> None:
    images = painter.generate_images(3, seed=5)
    record = command("sample", str(painter.path), "--n", "3", "--seed", "5", "--out", str(tmp_path))
    for image, file in zip(images, record["pictures"], strict=True):
        np.testing.assert_array_equal(np.asarray(image), pixels(file))
    assert images.sheet() == Path(record["sheet"]).read_bytes() == images._repr_png_()
    files, sheet = images.save(tmp_path / "saved")
    assert [pixels(file).tolist() for file in files] == images.pixels.tolist()
    assert sheet.read_bytes() == images.sheet()


def test_image_depends_on_its_seed_alone(painter: linnet.Run) -> None:
    images = painter.generate_images(3, seed=5)
    assert images.seeds == (5, 6, 7)
    np.testing.assert_array_equal(painter.generate_images(seed=7).pixels[0], images.pixels[2])


def test_images_are_completed(painter: linnet.Run, tmp_path: Path) -> None:
    painter.generate_images(2, seed=9).save(tmp_path)
    files = [tmp_path / "picture_0000.png", tmp_path / "picture_0001.png"]
    images = painter.generate_images(2, complete=files, keep=0.5, seed=1)
    assert len(images) == 4
    for i, image in enumerate(images.pixels):
        np.testing.assert_array_equal(image[:2], pixels(files[i // 2])[:2])
    assert Image.open(io.BytesIO(images.sheet())).width > Image.open(io.BytesIO(images.sheet())).height


def test_embeddings_are_those_of_the_command(prior: linnet.Run, given: dict[str, Any], tmp_path: Path) -> None:
    for name, values in given.items():
        np.save(tmp_path / f"{name}.npy", values)
    found = prior.sample(**given, n=2, steps=4, guidance=1.5, seed=3)
    record = command(
        *("sample", str(prior.path), "--embedding", str(tmp_path / "embeddings.npy"), "--out", str(tmp_path / "out")),
        *("--text-encodings", str(tmp_path / "text_encodings.npy"), "--n", "2", "--steps", "4", "--guidance", "1.5"),
        *("--seed", "3"),
    )
    assert found.embeddings.tolist() == [text["embedding"] for text in record["texts"]]
    assert list(found.seeds) == [text["seed"] for text in record["texts"]]
    assert found.cosines is not None
    assert found.cosines.tolist() == [text["cosines_with_text"] for text in record["texts"]]
    assert (found.note, found.steps) == (record["remark"], 4)
    assert "text" in (found._repr_html_() or "")
    assert found._repr_png_() is None


@pytest.mark.slow
@pytest.mark.optimized
def test_texts_together_equal_each_alone(prior: linnet.Run, given: dict[str, Any]) -> None:
    together = prior.sample(**given, steps=4)
    for i in range(2):
        alone = prior.sample(**{name: values[i] for name, values in given.items()}, steps=4)
        np.testing.assert_array_equal(alone.embeddings[0], together.embeddings[i])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"texts": ""}, "at least one text"),
        ({"texts": ["a", ""]}, "none of them empty"),
        ({"texts": "a cat"}, "no encoder is recorded for the pairs"),
        ({"embeddings": np.zeros((1, 3))}, "embedding is 'of shape"),
        ({"embeddings": np.zeros((1, 8)), "texts": "a"}, "leave one of them out"),
        ({"text_encodings": np.zeros((1, 3, 8))}, "add embeddings"),
        ({"guidance": -1.0}, "guidance is -1"),
        ({"n": 0}, "n is 0"),
        ({"steps": 99}, "steps"),
        ({"solver": "euler"}, "solver"),
        ({"nearest": 0}, "nearest is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_of_a_prior_are_errors(prior: linnet.Run, values: dict[str, Any], message: str) -> None:
    with pytest.raises(linnet.UserError, match=message):
        prior.sample(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"keep": 2.0}, "keep is 2"),
        ({"seed": -1}, "seed is -1"),
        ({"temperature": -1.0}, "temperature"),
        ({"complete": ["missing.png"]}, "complete is 'missing.png'"),
        ({"complete": [__file__]}, "a picture that can be read"),
    ],
)
def test_bad_settings_of_images_are_errors(painter: linnet.Run, values: dict[str, Any], message: str) -> None:
    with pytest.raises(linnet.UserError, match=message):
        painter.generate_images(**values)


def test_each_kind_of_run_names_its_own_methods(painter: linnet.Run, prior: linnet.Run) -> None:
    for run, method, fix in (
        (painter, "session", "generate_images"),
        (painter, "sample", "generate_images"),
        (prior, "generate", "use sample"),
        (prior, "score", "use sample"),
    ):
        with pytest.raises(linnet.UserError, match=fix):
            getattr(run, method)(*(["x"] if method != "session" else []))
