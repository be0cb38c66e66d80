"""Nearest-neighbour search over image embeddings, and retrieval recall."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from linnet.config.schema import EMOJI_PAIRS
from linnet.data.embeddings.pairs import EmbeddingPairs
from linnet.data.splits import SPLITS

BLOCK = 65_536
"""Rows compared at a time, so that memory is bounded for a set of any size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbors:
    rows: Int64[np.ndarray, "B k"]
    """Positions in the index, nearest first; ties are ordered by position."""
    cosines: Float32[np.ndarray, "B k"]
    captions: list[list[str]] | None
    images: UInt8[np.ndarray, "B k h w 3"] | None
    """The pixels; only available for the emoji."""


@dataclasses.dataclass(frozen=True)
class NeighborIndex:
    """The image embeddings of some splits of a set."""

    pairs: EmbeddingPairs
    splits: Sequence[str] = SPLITS

    @functools.cached_property
    def source_rows(self) -> Int64[np.ndarray, " n"]:
        return np.concatenate([self.pairs.split(name) for name in self.splits])

    @property
    def n_rows(self) -> int:
        return len(self.source_rows)

    def nearest(self, embeds: Float32[np.ndarray, "B D"], k: int) -> Neighbors:
        """Return the k nearest rows by cosine similarity; k is capped at the number of rows."""
        k = min(k, self.n_rows)
        queries = l2_normalize(np.asarray(embeds, np.float32))
        rows, best = np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32)
        for at in range(0, self.n_rows, BLOCK):
            images = l2_normalize(self.pairs.images.read(self.source_rows[at : at + BLOCK]))
            cosines = np.concatenate([best, queries @ images.T], axis=1)
            block = np.broadcast_to(np.arange(at, at + len(images)), (len(queries), len(images)))
            numbered = np.concatenate([rows, block], axis=1)
            chosen = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
            rows, best = np.take_along_axis(numbered, chosen, 1), np.take_along_axis(cosines, chosen, 1)
        return Neighbors(rows=rows, cosines=best, captions=self._captions(rows), images=self._images(rows))

    def _captions(self, rows: Int64[np.ndarray, "B k"]) -> list[list[str]] | None:
        if self.pairs.text_captions is None:
            return None
        flat = self.pairs.text_captions.read(self.source_rows[rows].reshape(-1))
        return [flat[i : i + rows.shape[1]] for i in range(0, len(flat), rows.shape[1])]

    def _images(self, rows: Int64[np.ndarray, "B k"]) -> UInt8[np.ndarray, "B k h w 3"] | None:
        if self.pairs.origin["source"] != EMOJI_PAIRS:
            return None
        return _emoji_images()[self.source_rows[rows]]


def recall(
    texts: Float32[np.ndarray, "n D"], images: Float32[np.ndarray, "n D"], at: Sequence[int] = (1, 10)
) -> dict[str, float]:
    """Return how often a row's own partner is among the nearest k of all n, in both directions.

    Ties (a caption that occurs twice) share their ranks, so identical vectors score chance level, k / n.
    """
    scores = l2_normalize(texts) @ l2_normalize(images).T
    own = np.diag(scores)
    result: dict[str, float] = {}
    for direction, rows in (("text_to_image", scores), ("image_to_text", scores.T)):
        nearer, equal = (rows > own[:, None]).sum(1), (rows == own[:, None]).sum(1)
        result |= {f"{direction}@{k}": float(np.clip((k - nearer) / equal, 0, 1).mean()) for k in at}
    return result


def l2_normalize(x: Float[np.ndarray, "*B D"]) -> Float[np.ndarray, "*B D"]:
    """Scale rows to unit norm; a row of zeros stays zero."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@functools.lru_cache(maxsize=1)
def _emoji_images() -> UInt8[np.ndarray, "n h w 3"]:
    from linnet.data.sources.emoji import open_emoji

    return open_emoji(32)[0]
