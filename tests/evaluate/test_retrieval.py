"""A prior beside simple predictors: each is what it says, and no one finds more than is there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.config.schema import PairsConfig
from linnet.data.embeddings import EmbeddingPairs, open_pairs
from linnet.data.embeddings import neighbors as gallery
from linnet.data.embeddings.vectors import Vectors
from linnet.evaluate import retrieval
from linnet.evaluate.retrieval import SimilarityMatrix


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(
    root: Path, texts: np.ndarray, images: np.ndarray, validation: float = 0.2, test: float = 0.0
) -> EmbeddingPairs:
    path = root / "pairs.npz"
    np.savez(path, text_embed=texts, image_embed=images, caption=np.array([f"caption {i}" for i in range(len(texts))]))
    return open_pairs(PairsConfig(source=str(path), validation_fraction=validation, test_fraction=test), 0)


def mean_cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((gallery.l2_normalize(a) * gallery.l2_normalize(b)).sum(1).mean())


def test_ridge_is_least_squares_with_a_free_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, images = normal(0, 50, 5) + 2, normal(1, 50, 7) - 1
    monkeypatch.setattr(retrieval, "BLOCK", 8)  # so that fifty rows are several blocks
    found = retrieval.baselines(made(tmp_path, texts, images, validation=0.0))
    assert found.strength == retrieval.USUAL_STRENGTH
    # The oracle: rows that pull the weights, but not the bias, to 0.
    x, y = texts.astype(np.float64), images.astype(np.float64)
    pull = math.sqrt(found.strength * np.linalg.eigvalsh(np.cov(x.T, bias=True) * len(x)).mean())
    left = np.block([[x, np.ones((50, 1))], [pull * np.eye(5), np.zeros((5, 1))]])
    solved = np.linalg.lstsq(left, np.concatenate([y, np.zeros((5, 7))]), rcond=None)[0]
    new = normal(2, 6, 5)
    predicted = found.predict(new)
    np.testing.assert_allclose(predicted["ridge"], new @ solved[:5] + solved[5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(predicted["mean"], np.tile(y.mean(0), (6, 1)), rtol=1e-6)


def test_text_is_an_image_only_where_widths_agree(tmp_path: Path) -> None:
    texts, images = normal(0, 20, 6), normal(1, 20, 6)
    same = retrieval.baselines(made(tmp_path, texts, images)).predict(texts[:3])
    assert list(same) == ["text", "mean", "ridge"]
    np.testing.assert_array_equal(same["text"], texts[:3])
    assert list(retrieval.baselines(made(tmp_path, texts[:, :5], images)).predict(texts[:3, :5])) == ["mean", "ridge"]


def test_validation_chooses_the_strength(tmp_path: Path) -> None:
    """Few rows, many dimensions, much noise: the weakest ridge fits the noise."""
    texts = normal(0, 60, 30)
    images = texts[:, :4] @ normal(1, 4, 8) + 3 * normal(2, 60, 8)
    pairs = made(tmp_path, texts, images, validation=0.3)
    held = pairs.split("validation")
    found = retrieval.baselines(pairs)
    assert found.strength > retrieval.STRENGTHS[0]
    best = mean_cosine(found.predict(texts[held])["ridge"], images[held])
    for strength in retrieval.STRENGTHS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retrieval, "STRENGTHS", (strength,))
            other = retrieval.baselines(pairs).predict(texts[held])["ridge"]
        assert mean_cosine(other, images[held]) <= best + 1e-6


def test_dataset_is_validated_in_blocks_and_a_huge_one_partially(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = made(tmp_path, normal(0, 100, 4), normal(1, 100, 4))
    sizes: list[int] = []
    plain = Vectors.read
    monkeypatch.setattr(Vectors, "read", lambda self, rows: sizes.append(len(rows)) or plain(self, rows))
    monkeypatch.setattr(retrieval, "BLOCK", 8)
    monkeypatch.setattr(retrieval, "MAX_FITTED", 40)
    retrieval.baselines(pairs)
    assert max(sizes) <= 8
    assert sum(sizes) == 2 * (40 + 20)


def test_texts_all_alike_leave_the_mean(tmp_path: Path) -> None:
    predicted = retrieval.baselines(made(tmp_path, np.ones((20, 4), np.float32), normal(1, 20, 4))).predict(
        np.ones((2, 4))
    )
    np.testing.assert_allclose(predicted["ridge"], predicted["mean"], atol=1e-6)


@pytest.mark.parametrize("block", [7, 4096])
def test_recall_is_the_gallerys_copies_and_ties_included(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(retrieval, "BLOCK", block)
    images = normal(0, 40, 6)
    images[30:] = images[:10]  # ten images are there twice
    close, alike = images + 0.5 * normal(1, 40, 6), np.ones_like(images)
    rows = {row.name: row for row in retrieval.compare({"close": close, "alike": alike, "exact": images}, images)}
    assert list(rows) == ["close", "alike", "exact"]
    for name, predicted in (("close", close), ("alike", alike)):
        expected = gallery.recall(predicted, images)
        assert rows[name].recall_1 == pytest.approx(expected["text_to_image@1"], abs=1e-12)
        assert rows[name].recall_10 == pytest.approx(expected["text_to_image@10"], abs=1e-12)
        assert rows[name].cosine == pytest.approx(mean_cosine(predicted, images), abs=1e-6)
    assert (rows["exact"].cosine, rows["exact"].recall_1) == (pytest.approx(1.0), pytest.approx(30 / 40))
    assert rows["alike"].n == 40


def test_images_all_alike_are_found_by_chance() -> None:
    (row,) = retrieval.compare({"any": normal(0, 20, 3)}, np.ones((20, 3), np.float32))
    assert (row.recall_1, row.recall_10) == (pytest.approx(1 / 20), pytest.approx(10 / 20))


def test_nonfinite_queries_find_nothing(tmp_path: Path) -> None:
    images = normal(0, 12, 4)
    broken = images.copy()
    broken[3] = np.nan
    (row,) = retrieval.compare({"prior": broken}, images)
    assert row.recall_1 == pytest.approx(11 / 12)
    assert math.isnan(row.cosine)
    matrix = retrieval.similarity(None, images, broken, images)
    path = retrieval.write(tmp_path, [row], matrix, "test", 5, 16)
    assert json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))["rows"][0]["cosine"] is None
    read = retrieval.read(tmp_path)
    assert read is not None
    assert read.matrix is not None
    assert math.isnan(read.rows[0].cosine)
    assert math.isnan(read.matrix.cosines[0][3])
    assert read.matrix.cosines[3][0] == pytest.approx(matrix.cosines[3][0], abs=1e-4)


def test_rows_shown_are_spread_and_each_has_a_text_of_its_own() -> None:
    texts = np.repeat(normal(0, 50, 8), 2, axis=0)  # every caption twice
    captions = [f"caption {i}" for i in range(100)]
    matrix = retrieval.similarity(captions, texts, texts + 0.1 * normal(1, 100, 8), texts, n=10)
    assert matrix.captions == tuple(f"caption {i}" for i in range(0, 100, 10))
    assert matrix.by == "text"
    cosines = np.array(matrix.cosines)
    assert (cosines.argmax(1) == np.arange(10)).all()
    for i, j in ((0, 0), (2, 7)):
        a, b = texts[10 * i].astype(np.float64), (texts + 0.1 * normal(1, 100, 8))[10 * j].astype(np.float64)
        assert cosines[i, j] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)
    assert len(retrieval.similarity(None, texts, texts, texts, n=40).captions) == 40
    assert retrieval.similarity(None, texts[:6], texts[:6], texts[:6]).captions == ("row 0", "row 2", "row 4")


def test_texts_of_another_width_are_shown_by_their_images() -> None:
    texts, images = normal(0, 5, 3), normal(1, 5, 4)
    matrix = retrieval.similarity(None, texts, images, images)
    assert matrix.by == "image"
    np.testing.assert_allclose(np.diag(matrix.cosines), 1.0, atol=1e-6)


def test_captions_belong_to_the_rows_that_were_evaluated(tmp_path: Path) -> None:
    texts, images = normal(0, 40, 4), normal(1, 40, 4)
    pairs = made(tmp_path, texts, images, validation=0.25, test=0.25)
    for limit in (None, 4):
        chosen = pairs.evaluation_rows("test", limit)
        part = (texts[chosen], images[chosen], images[chosen], texts[chosen])
        rows, matrix = retrieval.side_by_side(pairs, "test", len(chosen), *part, retrieval.baselines(pairs))
        assert matrix.captions == tuple(f"caption {row}" for row in chosen)
        assert [row.name for row in rows] == ["prior", retrieval.BEST, "text", "mean", "ridge"]
        assert rows[0].recall_1 == 1.0
        assert rows[1].cosine == rows[2].cosine  # both are the texts
    first = (texts[chosen][:2], images[chosen][:2], images[chosen][:2], None)
    rows, matrix = retrieval.side_by_side(pairs, "test", len(chosen), *first, None)
    assert matrix.captions == tuple(f"caption {row}" for row in chosen[:2])
    assert [row.name for row in rows] == ["prior"]


def test_written_files_are_read_back(tmp_path: Path) -> None:
    images = normal(0, 9, 4)
    rows = retrieval.compare({"prior": images, "mean": np.ones_like(images)}, images)
    matrix = retrieval.similarity([f"ä {i}" for i in range(9)], images, images, images, n=3)
    retrieval.write(tmp_path, rows, matrix, "test", 12, 64)
    read = retrieval.read(tmp_path)
    assert read is not None
    assert (read.split, read.step, read.n_steps, list(read.rows)) == ("test", 12, 64, rows)
    assert read.matrix is not None
    assert read.matrix.captions == matrix.captions
    np.testing.assert_allclose(read.matrix.cosines, matrix.cosines, atol=5e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["retrieval.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"rows": []}',
        '{"rows": [1], "step": 1, "n_steps": 1}',
        '{"rows": [{"n": 2}], "step": "1", "n_steps": 1}',
    ],
)
def test_corrupt_file_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "retrieval.json").write_text(content)
    assert retrieval.read(tmp_path) is None


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        {"captions": [], "cosines": [], "by": "text"},
        {"captions": ["a"], "cosines": [[1.0, 2.0]], "by": "text"},
        {"captions": ["a"], "cosines": ["1"], "by": "text"},
        {"captions": ["a"], "cosines": [[1.0]], "by": "sound"},
        {"captions": ["a"] * 41, "cosines": [[0.0] * 41] * 41, "by": "text"},
    ],
)
def test_corrupt_matrix_is_none(values: Any) -> None:
    assert SimilarityMatrix.from_json(values) is None
