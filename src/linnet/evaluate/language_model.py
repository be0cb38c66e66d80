"""Evaluation of language models: state is carried through each sequence, every token counts once, sums are float64 on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from linnet.config.schema import RunConfig
from linnet.data import Batch, TokenDataset
from linnet.evaluate.positions import ByPosition, PositionSums
from linnet.models.base import TokenFamily
from linnet.parallel import sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    split: str
    tokens: int
    bytes: int
    words: int | None
    """Number of words in the text, if the complete split was read and its words are counted."""
    unit: str
    """Unit that one byte of the data represents: a `byte` of text, or a `dimension` of an image."""
    nats: float
    """Negative log-likelihood, summed over all tokens."""
    by_position: ByPosition

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def word_perplexity(self) -> float:
        """Word-level perplexity as in papers on books: exp of the total NLL divided by the number of words."""
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
            "per_position": self.by_position.to_json(),
        }


def make_nats(family: TokenFamily, cfg: RunConfig) -> Callable[..., Any]:
    """Return the jitted function that computes per-token NLL of one segment of sequences."""
    return jax.jit(lambda params, buffers, carry, batch: family.nats(params, buffers, carry, batch, cfg.model))


def evaluate(
    family: TokenFamily,
    cfg: RunConfig,
    params: Any,
    buffers: Any,
    data: TokenDataset,
    split: str,
    *,
    nats: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    progress: Callable[[Iterable[Batch]], Iterable[Batch]] = lambda batches: batches,
) -> Evaluation:
    """Evaluate a split. Sequences are processed in segments of `update_len`, so memory does not grow with their length."""
    data.check_fit(cfg.lm.n_vocab, cfg.lm.end_id, cfg.d_condition)
    data = data.with_bos(cfg.lm.bos_id)
    nats = nats or make_nats(family, cfg)
    size = batch_size or cfg.data.batch_size
    mesh = sharding.make_mesh() if mesh is None else mesh
    begin = _make_empty_carry(family, cfg, size, mesh)
    length, update_len = cfg.tokens.sequence_len, cfg.tokens.update_len
    total, count, n_bytes = np.zeros(length), np.zeros(length), 0
    positions = PositionSums(length)
    lengths = data.tokenizer.lengths()
    for batch in progress(data.evaluation(split, size, limit)):
        carry = begin()
        positions.begin(size)
        for start in range(0, length, update_len):
            part = batch.slice(start, start + update_len)
            on_mesh = sharding.global_batch(part, (0, 1), size, mesh, family.rules)
            values, carry = nats(params, buffers, carry, on_mesh)
            values = sharding.to_host(values)
            counted = np.asarray(part.loss_mask, np.float64)
            nats_here = np.asarray(values, np.float64)
            total[start : start + update_len] += (nats_here * counted).sum(axis=0)
            count[start : start + update_len] += counted.sum(axis=0)
            positions.add(start, nats_here, counted)
            n_bytes += int((counted * lengths[np.asarray(part.targets)]).sum())
    chosen = data.split(split)
    is_complete = int(count.sum()) == chosen.n_tokens
    return Evaluation(
        split=split,
        tokens=int(count.sum()),
        bytes=chosen.n_bytes - data.unpredicted_bytes(split) if is_complete else n_bytes,
        words=chosen.n_words if is_complete else None,
        unit="byte" if data.shape is None else "dimension",
        nats=float(total.sum()),
        by_position=positions.finish(),
    )


def _make_empty_carry(family: TokenFamily, cfg: RunConfig, size: int, mesh: Mesh) -> Callable[[], Any]:
    """Return a function that makes an empty carry directly in its sharding."""
    shapes = jax.eval_shape(lambda: family.empty_carry(cfg.model, size))
    shardings = sharding.named_shardings(shapes, family.carry_axes(shapes), mesh, family.rules)
    return jax.jit(lambda: family.empty_carry(cfg.model, size), out_shardings=shardings)
