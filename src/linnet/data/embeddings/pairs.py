"""`EmbeddingPairs`: the splits of a run on embeddings. A batch is a pure function of the step, so resuming needs no other state.

Letters: B rows, L text positions, T width of a text embedding, D width of an image embedding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float32, Int64

from linnet.config.schema import PairsConfig
from linnet.core.errors import UserError, invalid
from linnet.core.pytree import pytree, replace
from linnet.data import shuffle
from linnet.data.embeddings.captions import Captions
from linnet.data.embeddings.vectors import Vectors
from linnet.data.splits import SPLITS, check_split, choose_evenly


@pytree
class PairBatch:
    text_embed: Float32[Array | np.ndarray, "B T"]
    image_embed: Float32[Array | np.ndarray, "B D"]
    encodings: Float32[Array | np.ndarray, "B L T"] | None
    """One vector per text position; an all-zero vector is padding. None if the source has no token encodings."""
    mask: Float32[Array | np.ndarray, " B"]
    """0 for rows that only fill up the last batch of an evaluation; their vectors are zeros."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPairs:
    """Rows and their order, independent of the storage format."""

    cfg: PairsConfig
    seed: int
    images: Vectors
    texts: Vectors
    encodings: Vectors | None
    text_captions: Captions | None
    rows: dict[str, Int64[np.ndarray, " n"]]
    """Row indices of the source for each split."""
    origin: dict[str, Any]
    """Provenance of the splits and counts of excluded rows, for `describe`."""
    fingerprint: str
    """Hash of the content of all splits. A resumed run compares it to detect changed data."""
    source_warnings: tuple[str, ...] = ()
    """Warnings about the rows of the source."""

    kind = "pairs"

    def batch(self, step: int, host: int = 0, n_hosts: int = 1) -> PairBatch:
        """Return the training batch of update `step`, in the order of (seed, epoch); an epoch may end in mid-batch.

        Each host reads its own rows; the global batch is the same for any number of hosts.
        """
        assert step >= 0
        host_rows = shuffle.host_slice(self.cfg.batch_size, host, n_hosts)
        train = self.rows["train"]
        chosen = shuffle.window_indices(
            self.seed, step * self.cfg.batch_size + host_rows.start, len(host_rows), len(train)
        )
        batch = self.read_batch(train[chosen], len(host_rows))
        return batch if not self.cfg.mix else self._mix_rows(batch, step, host_rows)

    def _mix_rows(self, batch: PairBatch, step: int, host_rows: range) -> PairBatch:
        """Mix some rows with other rows of the split. Every host makes all draws of a step and uses its own."""
        draws = np.random.Generator(np.random.Philox(key=np.array([self.seed, step], np.uint64)))
        values = draws.random((3, self.cfg.batch_size))[:, host_rows.start : host_rows.stop]
        is_mixed, weight, other = values[0] < self.cfg.mix, values[1], values[2]
        train = self.rows["train"]
        weight = np.where(is_mixed, weight, 0.0).astype(np.float32)[:, None]
        partners = train[(other * len(train)).astype(np.int64)]

        def interpolate(own: np.ndarray, vectors: Vectors) -> np.ndarray:
            blend = (1 - weight) * own + weight * vectors.read(partners)
            norms = np.linalg.norm(own, axis=1, keepdims=True)
            scaled = blend * (norms / np.maximum(np.linalg.norm(blend, axis=1, keepdims=True), 1e-12))
            return np.where(weight > 0, scaled, own).astype(np.float32)

        text, image = np.asarray(batch.text_embed), np.asarray(batch.image_embed)
        return replace(batch, text_embed=interpolate(text, self.texts), image_embed=interpolate(image, self.images))

    def evaluation(self, split: str, batch_size: int, limit: int | None = None) -> Iterator[PairBatch]:
        """Iterate over every pair of a split once, in its order; the last batch is filled up with masked rows.

        `limit` is the number of pairs to read, spread evenly over the split.
        """
        if batch_size < 1:
            raise invalid("batch size of the evaluation", batch_size, "at least 1", f"use {self.cfg.batch_size}")
        rows = self.evaluation_rows(split, limit)
        return (self.read_batch(rows[at : at + batch_size], batch_size) for at in range(0, len(rows), batch_size))

    def evaluation_rows(self, split: str, limit: int | None = None) -> Int64[np.ndarray, " n"]:
        """Return the row indices of the source that an evaluation reads."""
        rows = self.split(split)
        chosen = choose_evenly(len(rows), limit)
        if not len(rows):
            raise UserError(
                f"the {split} split has no pairs. Fix: set --data.{split}-fraction 0.05, or use a source with more rows."
            )
        return rows[chosen]

    def split(self, name: str) -> Int64[np.ndarray, " n"]:
        """Return the row indices of the source that belong to a split."""
        check_split(name)
        return self.rows[name]

    def n_rows(self, split: str) -> int:
        return len(self.split(split))

    def read_batch(self, rows: Int64[np.ndarray, " k"], n_rows: int) -> PairBatch:
        """Return these rows of the source as a batch, padded with masked rows of zeros up to `n_rows`."""
        assert len(rows) <= n_rows, f"{len(rows)} pairs do not fit into {n_rows} rows"
        return PairBatch(
            text_embed=_read_padded(self.texts, rows, n_rows),
            image_embed=_read_padded(self.images, rows, n_rows),
            encodings=None if self.encodings is None else _read_padded(self.encodings, rows, n_rows),
            mask=(np.arange(n_rows) < len(rows)).astype(np.float32),
        )

    def captions(self, split: str, rows: Sequence[int]) -> list[str] | None:
        """Return the captions at these positions of a split; None if the source has no captions."""
        if self.text_captions is None:
            return None
        return self.text_captions.read(self.split(split)[np.asarray(rows, np.int64)])

    @property
    def text_width(self) -> int:
        return self.texts.width

    @property
    def image_width(self) -> int:
        return self.images.width

    @property
    def text_len(self) -> int | None:
        """Positions of the text encodings."""
        return None if self.encodings is None else self.encodings.shape[0]

    def describe(self) -> dict[str, Any]:
        """Return plain values for logs, reports and the run's JSON files; `warnings` are sentences for the user."""
        return {
            **self.origin,
            "kind": self.kind,
            "text_width": self.text_width,
            "image_width": self.image_width,
            "text_len": self.text_len,
            "captions": self.text_captions is not None,
            "splits": {name: {"pairs": len(self.rows[name])} for name in SPLITS},
            "fingerprint": self.fingerprint,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        messages = list(self.source_warnings)
        if len(self.rows["train"]) < self.cfg.batch_size:
            messages.append(
                f"There are {len(self.rows['train']):,} pairs to train on, fewer than one batch of {self.cfg.batch_size}: an update "
                "sees pairs more than once. A smaller --data.batch-size is better."
            )
        return messages


def split_rows(
    cfg: PairsConfig, kept: Int64[np.ndarray, " n"], split_of: Int64[np.ndarray, " all"] | None
) -> tuple[dict[str, Int64[np.ndarray, " k"]], str]:
    """Return the kept rows by split, and a description of the method.

    By default rows are split by fraction in order, as in the reference: train, validation, test. `split_of` gives the split of each
    row (an index of SPLITS); -1 means `not test`, and the last part of those rows is used for validation.
    """
    if split_of is None:
        n_test, n_validation = (
            int(fraction * len(kept) + 1e-6) for fraction in (cfg.test_fraction, cfg.validation_fraction)
        )
        ends = np.cumsum([len(kept) - n_test - n_validation, n_validation])
        return dict(zip(SPLITS, np.split(kept, ends), strict=True)), "the last rows, in order"
    kept_splits = split_of[kept]
    rows = {name: kept[kept_splits == i] for i, name in enumerate(SPLITS)}
    undecided = kept[kept_splits < 0]
    if not len(undecided):
        return rows, "as the source says"
    n_validation = int(cfg.validation_fraction * len(undecided) + 1e-6)
    train, validation = np.split(undecided, [len(undecided) - n_validation])
    return {
        **rows,
        "train": train,
        "validation": validation,
    }, "test as the source says, validation the last of the others"


def compute_fingerprint(parts: Sequence[str], rows: dict[str, Int64[np.ndarray, " n"]]) -> str:
    split_hashes = [hashlib.sha256(rows[name].astype("<i8").tobytes()).hexdigest() for name in SPLITS]
    return hashlib.sha256(json.dumps([*parts, *split_hashes]).encode()).hexdigest()


def _read_padded(vectors: Vectors, rows: Int64[np.ndarray, " k"], n_rows: int) -> Float32[np.ndarray, "B ..."]:
    out = np.zeros((n_rows, *vectors.shape), np.float32)
    out[: len(rows)] = vectors.read(rows)
    return out
