"""Evaluation: the state carried through each sequence, every token counted exactly once, sums in float64 on the host."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from linnet import sharding
from linnet.config import RunConfig
from linnet.data import Batch, Data
from linnet.families.family import TokenFamily

N_POSITION_BINS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    split: str
    tokens: int
    bytes: int
    words: int | None
    """Of the text, where the whole split was read and its words were counted."""
    unit: str
    """What a byte of the data is: a byte of text, or a dimension of a picture."""
    nats: float
    """Sum over all tokens."""
    position_edges: list[int]
    position_nats: list[float]
    """Mean nats per token between two edges; NaN where there was no token."""

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def word_perplexity(self) -> float:
        """As in the papers on books: the likelihood of all tokens, shared among the words of the text."""
        return math.exp(min(self.nats / self.words, 700.0)) if self.words else math.nan

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "nats_per_token": self.loss,
            "nats_per_byte": self.nats / self.bytes if self.bytes else None,
            "bits_per_token": self.loss / math.log(2),
            "bits_per_byte": self.bits_per_byte if self.bytes else None,
            "perplexity": math.exp(min(self.loss, 700.0)),
            **({"bits_per_dim": self.bits_per_byte} if self.unit == "dimension" else {}),
            **({"words": self.words, "word_perplexity": self.word_perplexity} if self.words else {}),
            "per_position": {
                "edges": self.position_edges,
                "loss": [None if math.isnan(x) else x for x in self.position_nats],
            },
        }


def make_nats(family: TokenFamily, cfg: RunConfig) -> Callable[..., Any]:
    """The compiled reader of one stretch of sequences."""
    return jax.jit(lambda params, buffers, carry, batch: family.nats(params, buffers, carry, batch, cfg.model))


def evaluate(
    family: TokenFamily,
    cfg: RunConfig,
    params: Any,
    buffers: Any,
    data: Data,
    split: str,
    *,
    nats: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    progress: Callable[[Iterable[Batch]], Iterable[Batch]] = lambda batches: batches,
) -> Evaluation:
    """Reads whole sequences stretch by stretch, so that memory does not follow their length."""
    data.must_fit(cfg.writer.n_vocab, cfg.writer.end_id, cfg.d_condition)
    data = data.begun_by(cfg.writer.bos_id)
    nats = nats or make_nats(family, cfg)
    size = batch_size or cfg.data.batch_size
    mesh = sharding.make_mesh() if mesh is None else mesh
    begin = _beginning(family, cfg, size, mesh)
    length, stretch = cfg.tokens.sequence_len, cfg.tokens.update_len
    total, count, n_bytes = np.zeros(length), np.zeros(length), 0
    lengths = data.tokenizer.lengths()
    for batch in progress(data.evaluation(split, size, limit)):
        carry = begin()
        for start in range(0, length, stretch):
            part = batch.stretch(start, start + stretch)
            placed = sharding.put_rows(part, (0, 1), size, mesh, family.RULES)
            values, carry = nats(params, buffers, carry, placed)
            values = sharding.to_host(values)
            counted = np.asarray(part.loss_mask, np.float64)
            total[start : start + stretch] += (np.asarray(values, np.float64) * counted).sum(axis=0)
            count[start : start + stretch] += counted.sum(axis=0)
            n_bytes += int((counted * lengths[np.asarray(part.targets)]).sum())
    edges = position_edges(length)
    means = [_mean(total[a:b], count[a:b]) for a, b in itertools.pairwise(edges)]
    chosen = data.split(split)
    whole = int(count.sum()) == chosen.n_tokens
    return Evaluation(
        split=split,
        tokens=int(count.sum()),
        bytes=chosen.n_bytes - data.unpredicted_bytes(split) if whole else n_bytes,
        words=chosen.n_words if whole else None,
        unit="byte" if data.shape is None else "dimension",
        nats=float(total.sum()),
        position_edges=edges,
        position_nats=means,
    )


def _beginning(family: TokenFamily, cfg: RunConfig, size: int, mesh: Mesh) -> Callable[[], Any]:
    """Makes the carry of sequences of which nothing was read, where it is to lie."""
    shapes = jax.eval_shape(lambda: family.empty_carry(cfg.model, size))
    places = sharding.places(shapes, family.carry_names(shapes), mesh, family.RULES)
    return jax.jit(lambda: family.empty_carry(cfg.model, size), out_shardings=places)


def position_edges(length: int) -> list[int]:
    """0, 1, 2, 4, .. up to the length: context helps most at first, so bins grow."""
    edges = [0, *(2**i for i in range(length.bit_length()) if 2**i < length), length]
    return edges if len(edges) <= N_POSITION_BINS + 1 else [0, *edges[-N_POSITION_BINS:]]


def _mean(total: np.ndarray, count: np.ndarray) -> float:
    return float(total.sum() / count.sum()) if count.sum() else math.nan
