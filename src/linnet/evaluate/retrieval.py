"""Is a prior any good? Its predicted images beside those of three baselines that need no diffusion: how near they are to the true
images, and how often the right one is found among all by them. A run keeps the answer in `retrieval.json`.

Letters: n rows, k rows shown, T width of texts, D width of images.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64

from linnet.data.embeddings import EmbeddingPairs
from linnet.data.embeddings.neighbors import unit
from linnet.runs.metrics import replace_text

FILE_NAME = "retrieval.json"
PRIOR, BEST = "prior", "best of several"
N_CANDIDATES, CANDIDATE_STEPS = 16, 16
"""How many candidates the best is chosen of, in how many steps of DPM-Solver++."""
BLOCK = 4096
"""Rows in memory at a time, of what is read and of what is compared."""
MAX_FITTED, MAX_CHOOSING = 2**18, 2**13
"""Rows that ridge regression is fitted on, and that choose its strength: far more than its weights need, and a set of any size
is done in minutes."""
STRENGTHS, USUAL_STRENGTH = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), 0.1
"""In units of the mean variance of the texts' dimensions."""
MAX_SHOWN, SHOWN = 40, 32


# The baselines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baselines:
    """What a prior must beat."""

    mean_text: Float64[np.ndarray, " T"]
    mean_image: Float64[np.ndarray, " D"]
    weights: Float64[np.ndarray, "T D"]
    strength: float
    """Of the ridge, one of STRENGTHS."""

    def predict(self, texts: Float[np.ndarray, "n T"]) -> dict[str, Float[np.ndarray, "n D"]]:
        """An image for each text: the text itself (where the widths agree), the mean image, and by ridge regression."""
        same = {"text": np.asarray(texts, np.float32)} if len(self.mean_text) == len(self.mean_image) else {}
        mean = np.broadcast_to(self.mean_image.astype(np.float32), (len(texts), len(self.mean_image)))
        return {**same, "mean": mean, "ridge": self._ridge(texts).astype(np.float32)}

    def _ridge(self, texts: Float[np.ndarray, "n T"]) -> Float64[np.ndarray, "n D"]:
        return (np.asarray(texts, np.float64) - self.mean_text) @ self.weights + self.mean_image


def baselines(pairs: EmbeddingPairs) -> Baselines:
    """Fitted on the train split, block by block; the validation split chooses the ridge's strength."""
    n, sums = 0, [np.zeros(pairs.text_width), np.zeros(pairs.image_width)]
    xx, xy = (np.zeros((pairs.text_width, width)) for width in (pairs.text_width, pairs.image_width))
    for texts, images in _blocks(pairs, "train", MAX_FITTED):
        n, sums = n + len(texts), [sums[0] + texts.sum(0), sums[1] + images.sum(0)]
        xx += texts.T @ texts
        xy += texts.T @ images
    mean_text, mean_image = sums[0] / n, sums[1] / n
    # Around the means, which is what a bias that is not held down amounts to.
    spread, basis = np.linalg.eigh(xx - n * np.outer(mean_text, mean_text))
    spread = np.maximum(spread, 0.0)  # round-off may leave a hair below 0
    turned = basis.T @ (xy - n * np.outer(mean_text, mean_image))

    def fitted(strength: float) -> Baselines:
        held = spread + strength * spread.mean()
        weights = basis @ np.divide(turned, held[:, None], out=np.zeros_like(turned), where=held[:, None] > 0)
        return Baselines(mean_text=mean_text, mean_image=mean_image, weights=weights, strength=strength)

    if not pairs.n_rows("validation"):
        return fitted(USUAL_STRENGTH)
    choices = [fitted(strength) for strength in STRENGTHS]
    totals = np.zeros(len(choices))
    for texts, images in _blocks(pairs, "validation", MAX_CHOOSING):
        totals += [_cosines(one._ridge(texts), images).sum() for one in choices]
    return choices[int(np.argmax(totals))]


def _blocks(
    pairs: EmbeddingPairs, split: str, most: int
) -> Iterator[tuple[Float64[np.ndarray, "b T"], Float64[np.ndarray, "b D"]]]:
    """Texts and images of a split, or of so many rows spread evenly over it."""
    rows = pairs.evaluated(split, most)
    for at in range(0, len(rows), BLOCK):
        part = rows[at : at + BLOCK]
        yield pairs.texts.read(part).astype(np.float64), pairs.images.read(part).astype(np.float64)


# The comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """How one way to predict images did."""

    name: str
    cosine: float
    """Mean, with the true image."""
    recall_1: float
    """How often the true image is the nearest of all n to the predicted one."""
    recall_10: float
    n: int


def compare(predicted: Mapping[str, Float[np.ndarray, "n D"]], images: Float[np.ndarray, "n D"]) -> list[Row]:
    """A row for each, in their order. Each predicted image looks for its own among the n; a picture that is there several times
    shares its places among its copies, so that vectors all alike find as much as chance does."""
    distinct, own, copies = np.unique(images, axis=0, return_inverse=True, return_counts=True)
    own, wanted = own.reshape(-1), unit(np.asarray(distinct, np.float32))
    found: list[Row] = []
    for name, rows in predicted.items():
        assert rows.shape == images.shape, f"{name}: {rows.shape} predicted for {images.shape}"
        cosines, hits = np.zeros(len(rows)), np.zeros((2, len(rows)))
        for at in range(0, len(rows), BLOCK):
            part = slice(at, at + BLOCK)
            cosines[part] = _cosines(rows[part], images[part])
            hits[:, part] = _hits(unit(np.asarray(rows[part], np.float32)) @ wanted.T, own[part], copies, (1, 10))
        recalls = hits.mean(1)
        found.append(
            Row(
                name=name,
                cosine=float(cosines.mean()),
                recall_1=float(recalls[0]),
                recall_10=float(recalls[1]),
                n=len(rows),
            )
        )
    return found


def _hits(
    scores: Float[np.ndarray, "b m"],
    own: Int64[np.ndarray, " b"],
    copies: Int64[np.ndarray, " m"],
    at: Sequence[int],
) -> Float64[np.ndarray, "k b"]:
    """The chance that a row's own image is among its nearest k, of m distinct ones that are each there so many times."""
    mine = scores[np.arange(len(own)), own][:, None]
    nearer, equal = ((scores > mine) @ copies, (scores == mine) @ copies)
    # A prediction that is no number finds nothing, not even itself.
    return np.stack([np.clip((k - nearer) / np.maximum(equal, 1), 0, 1) * (equal > 0) for k in at])


def _cosines(a: Float[np.ndarray, "b D"], b: Float[np.ndarray, "b D"]) -> Float64[np.ndarray, " b"]:
    return (unit(np.asarray(a, np.float64)) * unit(np.asarray(b, np.float64))).sum(1)


# Captions against predicted images


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityMatrix:
    """Cosines of some rows: caption i with the image predicted for caption j. A good prior's diagonal stands out."""

    captions: tuple[str, ...]
    cosines: tuple[tuple[float, ...], ...]
    by: str
    """What stands for caption i: its `text`, or its true `image` where texts are of another width."""

    def to_json(self) -> dict[str, Any]:
        rows = [[round(value, 4) if math.isfinite(value) else None for value in row] for row in self.cosines]
        return {"captions": list(self.captions), "cosines": rows, "by": self.by}

    @staticmethod
    def from_json(values: Any) -> SimilarityMatrix | None:
        """None where that is no square of numbers: a file may hold anything."""
        if not isinstance(values, dict):
            return None
        captions, rows, by = values.get("captions"), values.get("cosines"), values.get("by")
        if not isinstance(captions, list) or not isinstance(rows, list) or by not in ("text", "image"):
            return None
        n = len(captions)
        if not 0 < n <= MAX_SHOWN or len(rows) != n or not all(isinstance(row, list) and len(row) == n for row in rows):
            return None
        read = tuple(tuple(_number(value) for value in row) for row in rows)
        return SimilarityMatrix(captions=tuple(map(str, captions)), cosines=read, by=by)


def similarity(
    captions: Sequence[str] | None,
    texts: Float[np.ndarray, "n T"],
    predicted: Float[np.ndarray, "n D"],
    images: Float[np.ndarray, "n D"],
    n: int = SHOWN,
) -> SimilarityMatrix:
    """Of at most so many rows, spread evenly over those with a text of their own: the same caption twice would hide the diagonal."""
    assert 1 <= n <= MAX_SHOWN
    assert len(texts) == len(predicted) == len(images)
    single = np.sort(np.unique(texts, axis=0, return_index=True)[1])
    n = min(n, len(single))
    rows: list[int] = single[np.arange(n) * len(single) // n].tolist()
    same = texts.shape[1] == images.shape[1]
    asked = unit(np.asarray((texts if same else images)[rows], np.float64))
    cosines = asked @ unit(np.asarray(predicted[rows], np.float64)).T
    return SimilarityMatrix(
        captions=tuple(f"row {row}" if captions is None else captions[row] for row in rows),
        cosines=tuple(map(tuple, cosines.tolist())),
        by="text" if same else "image",
    )


def side_by_side(
    pairs: EmbeddingPairs,
    split: str,
    n_evaluated: int,
    texts: Float[np.ndarray, "n T"],
    predicted: Float[np.ndarray, "n D"],
    images: Float[np.ndarray, "n D"],
    chosen: Float[np.ndarray, "n D"] | None,
    simple: Baselines | None,
) -> tuple[list[Row], SimilarityMatrix]:
    """A prior beside its baselines (where they could be fitted), and captions against what it predicts. The rows are the first of
    `n_evaluated` that `Pairs.evaluation` spread over the split."""
    at = np.arange(len(texts)) * pairs.n_rows(split) // n_evaluated
    best = {} if chosen is None else {BEST: chosen}
    rows = compare({PRIOR: predicted, **best, **({} if simple is None else simple.predict(texts))}, images)
    return rows, similarity(pairs.captions(split, at.tolist()), texts, predicted, images)


# The file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """What `retrieval.json` tells."""

    split: str
    step: int
    """Of training."""
    n_steps: int
    """Of denoising."""
    rows: tuple[Row, ...]
    matrix: SimilarityMatrix | None


def write(
    folder: Path, rows: Sequence[Row], matrix: SimilarityMatrix | None, split: str, step: int, n_steps: int
) -> Path:
    """Into a run's folder, whole or not at all."""
    values = {
        "split": split,
        "step": step,
        "n_steps": n_steps,
        "rows": [row_json(row) for row in rows],
        "similarity": None if matrix is None else matrix.to_json(),
    }
    path = folder / FILE_NAME
    replace_text(path, json.dumps(values, allow_nan=False, indent=1) + "\n")
    return path


def row_json(row: Row) -> dict[str, Any]:
    """Null where a figure is no number: the model had diverged."""
    values = dataclasses.asdict(row)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def read(folder: Path) -> Retrieval | None:
    """None where there is no such file, or nothing in it to show."""
    try:
        values = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("rows"), list):
        return None
    rows = tuple(row for row in map(_row, values["rows"]) if row is not None)
    step, n_steps = values.get("step"), values.get("n_steps")
    if not rows or type(step) is not int or type(n_steps) is not int:
        return None
    matrix = SimilarityMatrix.from_json(values.get("similarity"))
    return Retrieval(split=str(values.get("split")), step=step, n_steps=n_steps, rows=rows, matrix=matrix)


def _row(values: Any) -> Row | None:
    if not isinstance(values, dict) or type(values.get("n")) is not int:
        return None
    figures = {name: _number(values.get(name)) for name in ("cosine", "recall_1", "recall_10")}
    return Row(name=str(values.get("name")), n=values["n"], **figures)


def _number(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and -1e6 < value < 1e6
    return float(value) if good else math.nan
