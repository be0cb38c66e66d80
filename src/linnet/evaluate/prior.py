"""Evaluation of a prior: the loss of each set of weights, and the quality of the embeddings that they predict.

Every pair counts once, for any batch size; sums are float64 on the host. A pair's random draws depend only on its index in the split,
so metrics of different steps, weights and batch sizes are comparable.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.core.errors import invalid
from linnet.core.pytree import replace
from linnet.data.embeddings import EmbeddingPairs, PairBatch
from linnet.data.embeddings.neighbors import l2_normalize
from linnet.evaluate.retrieval import CANDIDATE_STEPS, N_CANDIDATES
from linnet.models import registry
from linnet.models.base import EmbeddingSampler
from linnet.models.model_config import PairModelConfig
from linnet.models.prior.sampling import best

MAX_CHOSEN = 1000
"""The best of several candidates is evaluated only for at most this many pairs."""
MAX_KEPT = 10_000
"""Maximum number of predicted embeddings kept for retrieval."""
FIGURES = (
    "baseline similarity",
    "similarity with text",
    "similarity with original image",
    "similarity with unrelated caption",
    "difference from baseline similarity",
)

Progress = Callable[[Iterable[PairBatch]], Iterable[PairBatch]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """The first evaluated pairs of a split, and the embeddings predicted for them."""

    texts: Float32[np.ndarray, "n T"]
    images: Float32[np.ndarray, "n D"]
    embeds: Float32[np.ndarray, "n D"]
    chosen: Float32[np.ndarray, "n D"] | None = None
    """For each pair, the candidate with the highest cosine similarity to its text, if requested."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorEvaluation:
    split: str
    pairs: int
    loss_type: str
    losses: dict[str, float]
    """Loss by set of weights: `online`, and `ema` if the run keeps one. The last of them is used for sampling."""
    cosines: dict[int, dict[str, float]]
    """The five cosine metrics, by number of denoising steps."""
    predicted: dict[int, Predicted]

    @property
    def loss(self) -> float:
        """Loss by which the best checkpoint is chosen: that of the EMA weights, if there are any."""
        return self.losses[self.sampled]

    @property
    def sampled(self) -> str:
        return list(self.losses)[-1]

    def to_json(self) -> dict[str, Any]:
        """Return the metrics under the names that the reference logs."""
        named = {f"metrics/{who}-{self.split}/{self.loss_type}-loss": value for who, value in self.losses.items()}
        for n_step, figures in self.cosines.items():
            named |= {f"metrics/{self.sampled}-{self.split}/{name} [steps={n_step}]": v for name, v in figures.items()}
        return {"split": self.split, "pairs": self.pairs, "loss": self.loss, **named}

    def summary(self) -> str:
        both = ", ".join(f"{who} {value:.4f}" for who, value in self.losses.items())
        return f"{self.split} loss {both}" + "".join(
            f"; in {n_step} steps cosine {figures['similarity with original image']:.4f} with the image, "
            f"{figures['similarity with text']:.4f} with the text"
            for n_step, figures in self.cosines.items()
        )


def evaluate_prior(
    cfg: RunConfig,
    weights: dict[str, Any],
    pairs: EmbeddingPairs,
    split: str,
    *,
    timesteps: Sequence[int] | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    choose: bool = False,
    progress: Progress = lambda batches: batches,
) -> PriorEvaluation:
    """Evaluate a prior in one pass over the split.

    `weights`: sets of weights, named as in `PriorEvaluation.losses`. `choose`: also evaluate the best of several candidates, if
    at most `MAX_CHOSEN` pairs are evaluated.
    """
    model, sampler = cfg.pair_model, _sampler(cfg)
    size = batch_size or cfg.data.batch_size
    check_fit(pairs, model)
    solvers = {n: sampler.solver(model, n) for n in (cfg.train.eval_timesteps if timesteps is None else timesteps)}
    sampled = sampler.prepare(list(weights.values())[-1], model)
    key = rng.fold_in_name(rng.root(cfg.seed), "evaluation")
    losses = dict.fromkeys(weights, 0.0)
    sums: dict[int, dict[str, float]] = {n: dict.fromkeys(FIGURES, 0.0) for n in solvers}
    kept: dict[int, list[tuple[np.ndarray, ...]]] = {n: [] for n in solvers}
    chosen: list[np.ndarray] = []
    choose = choose and len(pairs.evaluation_rows(split, limit)) <= MAX_CHOSEN and pairs.text_width == pairs.image_width
    seen = 0
    for batch in progress(pairs.evaluation(split, size, limit)):
        n = int(np.sum(batch.mask))
        batch = batch if model.text_encodings else replace(batch, encodings=None)
        for who, params in weights.items():
            values = np.asarray(sampler.row_losses(params, batch, key, seen, model), np.float64)
            losses[who] += float(values[:n].sum())
        for n_step, solver in solvers.items():
            embeds = _predict(sampler, sampled, batch, solver, key, seen, model)
            rolled = _predict(sampler, sampled, _rolled(batch, n), solver, key, seen, model)
            for name, value in five_cosines(batch, embeds, rolled, n).items():
                sums[n_step][name] += value
            if seen < MAX_KEPT:
                kept[n_step].append((np.asarray(batch.text_embed[:n]), np.asarray(batch.image_embed[:n]), embeds[:n]))
        if choose:
            chosen.append(_chosen(sampler, sampled, batch, key, seen, model)[:n])
        seen += n
    return PriorEvaluation(
        split=split,
        pairs=seen,
        loss_type=model.loss_name,
        losses={who: value / seen for who, value in losses.items()},
        cosines={n_step: {name: v / seen for name, v in figures.items()} for n_step, figures in sums.items()},
        predicted={
            n_step: Predicted(**_joined(rows), chosen=np.concatenate(chosen) if choose else None)
            for n_step, rows in kept.items()
        },
    )


def _sampler(cfg: RunConfig) -> EmbeddingSampler:
    sampler = registry.get(cfg.family).sampler
    if sampler is None:
        raise invalid("family", cfg.family, "one that predicts embeddings", "use a run of such a family")
    return sampler


def check_fit(pairs: EmbeddingPairs, model: PairModelConfig) -> None:
    """Raise if the data does not fit the model."""
    if pairs.image_width != model.dim:
        width = pairs.image_width
        raise invalid("model.dim", model.dim, f"the image embeddings' width, {width}", f"use --model.dim {width}")
    if pairs.text_width != model.d_text:
        width = pairs.text_width
        fix = f"use --model.text-dim {width}"
        raise invalid("model.text_dim", model.text_dim, f"the text embeddings' width, {width}", fix)
    if model.text_encodings and pairs.text_len is None:
        fix = "make pairs with `linnet data embed`, which writes them, or use --model.no-text-encodings"
        raise invalid("model.text_encodings", True, "False where the data has no token encodings of its texts", fix)
    if model.text_encodings and model.masks_text and 0 < model.max_text_len < (pairs.text_len or 0):
        needs = f"{pairs.text_len}, the positions of the data's token encodings, or 0: this release cuts none off"
        raise invalid("model.max_text_len", model.max_text_len, needs, f"use --model.max-text-len {pairs.text_len}")


def _predict(
    sampler: EmbeddingSampler,
    params: Any,
    batch: PairBatch,
    solver: Any,
    key: Array,
    first_row: int,
    cfg: PairModelConfig,
) -> Float32[np.ndarray, "B D"]:
    """Sample embeddings for a batch's texts. A row's noise depends on its index in the split."""
    keys = _row_keys(rng.fold_in_name(key, "noise"), first_row, len(batch.mask))
    encodings = None if batch.encodings is None else jnp.asarray(batch.encodings)
    return np.asarray(sampler.sample(params, jnp.asarray(batch.text_embed), encodings, solver, keys, cfg))


def _chosen(
    sampler: EmbeddingSampler, params: Any, batch: PairBatch, key: Array, first_row: int, cfg: PairModelConfig
) -> Float32[np.ndarray, "B D"]:
    """Return the best of each row's candidates, as `linnet sample --n` does."""
    solver = sampler.solver(cfg, min(CANDIDATE_STEPS, cfg.timesteps), "dpm")
    keys = (rng.fold_in(rng.fold_in_name(key, "candidates"), i) for i in range(N_CANDIDATES))
    candidates = [_predict(sampler, params, batch, solver, one, first_row, cfg) for one in keys]
    return np.asarray(best(jnp.stack(candidates, axis=1), jnp.asarray(batch.text_embed)))


@functools.partial(jax.jit, static_argnums=2)
def _row_keys(key: Array, first_row: int | Int[Array, ""], n_row: int) -> Array:
    return jax.vmap(lambda i: rng.fold_in(key, i))(first_row + jnp.arange(n_row))


def _rolled(batch: PairBatch, n: int) -> PairBatch:
    """Give every pair the text of the previous one."""
    order = np.arange(len(batch.mask))
    order[:n] = np.roll(order[:n], 1)
    encodings = None if batch.encodings is None else batch.encodings[order]
    return replace(batch, text_embed=batch.text_embed[order], encodings=encodings)


def five_cosines(batch: PairBatch, embeds: np.ndarray, unrelated: np.ndarray, n: int) -> dict[str, float]:
    """Return the five metrics summed over the first `n` pairs. Comparisons with texts are NaN if text and image widths differ."""
    texts, images = (np.asarray(x[:n], np.float64) for x in (batch.text_embed, batch.image_embed))
    found, other = (np.asarray(x[:n], np.float64) for x in (embeds, unrelated))
    same = texts.shape[1] == images.shape[1]
    baseline, with_text, with_other = (_cosine_sum(texts, x) if same else np.nan for x in (images, found, other))
    values = (baseline, with_text, _cosine_sum(images, found), with_other, with_text - baseline)
    return dict(zip(FIGURES, values, strict=True))


def _cosine_sum(a: np.ndarray, b: np.ndarray) -> float:
    return float((l2_normalize(a) * l2_normalize(b)).sum())


def _joined(rows: list[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
    columns = (np.concatenate(column)[:MAX_KEPT] for column in zip(*rows, strict=True))
    return dict(zip(("texts", "images", "embeds"), columns, strict=True))
