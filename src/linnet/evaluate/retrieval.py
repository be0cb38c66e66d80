"""Comparison of a prior with three baselines that need no diffusion: cosine similarity to the true image embeddings, and recall of
the true image among all. A run stores the results in `retrieval.json`.

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
from linnet.data.embeddings.neighbors import l2_normalize
from linnet.runs.metrics import replace_text

FILE_NAME = "retrieval.json"
PRIOR, BEST = "prior", "best of several"
N_CANDIDATES, CANDIDATE_STEPS = 16, 16
"""Candidates per text for best-of-n, and DPM-Solver++ steps for each."""
BLOCK = 4096
"""Rows read or compared at a time."""
MAX_FITTED, MAX_CHOOSING = 2**18, 2**13
"""Maximum rows to fit the ridge regression on, and to choose its strength with. More than enough for its weights, and bounds the
time to minutes for a dataset of any size."""
STRENGTHS, USUAL_STRENGTH = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), 0.1
"""Ridge strengths, in units of the mean variance of the text dimensions."""
MAX_SHOWN, SHOWN = 40, 32


# The baselines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baselines:
    """Baseline predictors that a prior should outperform."""

    mean_text: Float64[np.ndarray, " T"]
    mean_image: Float64[np.ndarray, " D"]
    weights: Float64[np.ndarray, "T D"]
    strength: float
    """Strength of the ridge penalty, one of STRENGTHS."""

    def predict(self, texts: Float[np.ndarray, "n T"]) -> dict[str, Float[np.ndarray, "n D"]]:
        """Predict an image embedding per text: the text itself (if the widths agree), the mean image, and ridge regression."""
        same = {"text": np.asarray(texts, np.float32)} if len(self.mean_text) == len(self.mean_image) else {}
        mean = np.broadcast_to(self.mean_image.astype(np.float32), (len(texts), len(self.mean_image)))
        return {**same, "mean": mean, "ridge": self._ridge(texts).astype(np.float32)}

    def _ridge(self, texts: Float[np.ndarray, "n T"]) -> Float64[np.ndarray, "n D"]:
        return (np.asarray(texts, np.float64) - self.mean_text) @ self.weights + self.mean_image


def baselines(pairs: EmbeddingPairs) -> Baselines:
    """Fit the baselines on the train split, block by block; the validation split selects the ridge strength."""
    n, sums = 0, [np.zeros(pairs.text_width), np.zeros(pairs.image_width)]
    xx, xy = (np.zeros((pairs.text_width, width)) for width in (pairs.text_width, pairs.image_width))
    for texts, images in _blocks(pairs, "train", MAX_FITTED):
        n, sums = n + len(texts), [sums[0] + texts.sum(0), sums[1] + images.sum(0)]
        xx += texts.T @ texts
        xy += texts.T @ images
    mean_text, mean_image = sums[0] / n, sums[1] / n
    # Centering the data is equivalent to an unpenalized bias.
    spread, basis = np.linalg.eigh(xx - n * np.outer(mean_text, mean_text))
    spread = np.maximum(spread, 0.0)  # rounding can make eigenvalues slightly negative
    turned = basis.T @ (xy - n * np.outer(mean_text, mean_image))

    def fitted(strength: float) -> Baselines:
        damped = spread + strength * spread.mean()
        weights = basis @ np.divide(turned, damped[:, None], out=np.zeros_like(turned), where=damped[:, None] > 0)
        return Baselines(mean_text=mean_text, mean_image=mean_image, weights=weights, strength=strength)

    if not pairs.n_rows("validation"):
        return fitted(USUAL_STRENGTH)
    choices = [fitted(strength) for strength in STRENGTHS]
    totals = np.zeros(len(choices))
    for texts, images in _blocks(pairs, "validation", MAX_CHOOSING):
        totals += [_cosines(one._ridge(texts), images).sum() for one in choices]
    return choices[int(np.argmax(totals))]


def _blocks(
    pairs: EmbeddingPairs, split: str, max_rows: int
) -> Iterator[tuple[Float64[np.ndarray, "b T"], Float64[np.ndarray, "b D"]]]:
    """Yield texts and images of a split, or of at most `max_rows` rows spread evenly over it."""
    rows = pairs.evaluation_rows(split, max_rows)
    for at in range(0, len(rows), BLOCK):
        part = rows[at : at + BLOCK]
        yield pairs.texts.read(part).astype(np.float64), pairs.images.read(part).astype(np.float64)


# The comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Scores of one predictor."""

    name: str
    cosine: float
    """Mean cosine similarity with the true image."""
    recall_1: float
    """Fraction of rows whose true image is the nearest of all n to the predicted one."""
    recall_10: float
    n: int


def compare(predicted: Mapping[str, Float[np.ndarray, "n D"]], images: Float[np.ndarray, "n D"]) -> list[Row]:
    """Return one row of scores per predictor, in order.

    Recall counts how often a predicted image retrieves its true image among the n. Ties and duplicate images share their ranks
    evenly, so that a constant prediction scores at chance level.
    """
    distinct, own, copies = np.unique(images, axis=0, return_inverse=True, return_counts=True)
    own, wanted = own.reshape(-1), l2_normalize(np.asarray(distinct, np.float32))
    found: list[Row] = []
    for name, rows in predicted.items():
        assert rows.shape == images.shape, f"{name}: {rows.shape} predicted for {images.shape}"
        cosines, hits = np.zeros(len(rows)), np.zeros((2, len(rows)))
        for at in range(0, len(rows), BLOCK):
            part = slice(at, at + BLOCK)
            cosines[part] = _cosines(rows[part], images[part])
            hits[:, part] = _hits(
                l2_normalize(np.asarray(rows[part], np.float32)) @ wanted.T, own[part], copies, (1, 10)
            )
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
    """Probability that a row's own image is among its k nearest, with m distinct images and their numbers of copies."""
    mine = scores[np.arange(len(own)), own][:, None]
    nearer, equal = ((scores > mine) @ copies, (scores == mine) @ copies)
    # A NaN prediction scores 0: it compares equal to nothing.
    return np.stack([np.clip((k - nearer) / np.maximum(equal, 1), 0, 1) * (equal > 0) for k in at])


def _cosines(a: Float[np.ndarray, "b D"], b: Float[np.ndarray, "b D"]) -> Float64[np.ndarray, " b"]:
    return (l2_normalize(np.asarray(a, np.float64)) * l2_normalize(np.asarray(b, np.float64))).sum(1)


# Captions against predicted images


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarityMatrix:
    """Cosines of caption i with the image predicted for caption j. A good prior has a dominant diagonal."""

    captions: tuple[str, ...]
    cosines: tuple[tuple[float, ...], ...]
    by: str
    """Embedding used for caption i: its `text`, or its true `image` if texts have another width."""

    def to_json(self) -> dict[str, Any]:
        rows = [[round(value, 4) if math.isfinite(value) else None for value in row] for row in self.cosines]
        return {"captions": list(self.captions), "cosines": rows, "by": self.by}

    @staticmethod
    def from_json(values: Any) -> SimilarityMatrix | None:
        """Parse untrusted JSON; None if it is not a valid square matrix."""
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
    """Return the matrix for at most `n` rows, spread evenly over those with distinct texts.

    Repeated captions would obscure the diagonal.
    """
    assert 1 <= n <= MAX_SHOWN
    assert len(texts) == len(predicted) == len(images)
    single = np.sort(np.unique(texts, axis=0, return_index=True)[1])
    n = min(n, len(single))
    rows: list[int] = single[np.arange(n) * len(single) // n].tolist()
    same = texts.shape[1] == images.shape[1]
    queries = l2_normalize(np.asarray((texts if same else images)[rows], np.float64))
    cosines = queries @ l2_normalize(np.asarray(predicted[rows], np.float64)).T
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
    """Compare a prior with its baselines (if they could be fitted), and its predictions with the captions.

    The rows are the first of the `n_evaluated` that `EmbeddingPairs.evaluation` spreads over the split.
    """
    at = np.arange(len(texts)) * pairs.n_rows(split) // n_evaluated
    best = {} if chosen is None else {BEST: chosen}
    rows = compare({PRIOR: predicted, **best, **({} if simple is None else simple.predict(texts))}, images)
    return rows, similarity(pairs.captions(split, at.tolist()), texts, predicted, images)


# The file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Content of `retrieval.json`."""

    split: str
    step: int
    """Training step."""
    n_steps: int
    """Denoising steps."""
    rows: tuple[Row, ...]
    matrix: SimilarityMatrix | None


def write(
    folder: Path, rows: Sequence[Row], matrix: SimilarityMatrix | None, split: str, step: int, n_steps: int
) -> Path:
    """Write `retrieval.json` to a run folder, atomically."""
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
    """Return a row as JSON. Nonfinite scores, of a diverged model, become null."""
    values = dataclasses.asdict(row)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def read(folder: Path) -> Retrieval | None:
    """Read `retrieval.json`; None if it is missing, invalid or has no rows."""
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
