"""Image embeddings that a prior samples for texts, and the nearest images of its data.

Letters: B texts, n candidates of each, L positions of token encodings, X width of text, D width of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int64

from linnet.core import rng
from linnet.core.errors import UserError, invalid
from linnet.data.embeddings.load import open_neighbor_index
from linnet.data.embeddings.neighbors import NeighborIndex, l2_normalize
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.encoders import Encoder, open_encoder
from linnet.data.encoders.encoder import encode_prompt
from linnet.models.prior import sampling
from linnet.models.prior.conditions import check_encodings, truncate_encodings
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.solver import Solver, SolverTable, default_steps, make_solver
from linnet.runs.load import LoadedRun

BATCH_SIZE = 64
"""Rows per batch, which bounds the memory. Sampling is batch-invariant, so results do not depend on it."""
MAX_GUIDANCE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts to sample for."""

    embeds: Float32[np.ndarray, "B X"]
    encodings: Float32[np.ndarray, "B L X"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    embeds: Float32[np.ndarray, "B D"]
    """For each text, the candidate most similar to it."""
    chosen: Int64[np.ndarray, " B"]
    cosines: Float32[np.ndarray, "B n"] | None
    """Cosines of the candidates with the text; None if text and image embeddings have different widths."""


def solver_table(cfg: PriorConfig, *, n: int, steps: int | None, solver: Solver, guidance: float) -> SolverTable:
    """Validate the settings and return the solver table, before anything is computed."""
    if n < 1:
        raise invalid("n", n, "at least 1", "use 1")
    if solver not in get_args(Solver):
        raise invalid("solver", solver, f"one of {', '.join(get_args(Solver))}", "use dpm")
    if not 0 <= guidance <= MAX_GUIDANCE:
        raise invalid("guidance", guidance, f"0 to {MAX_GUIDANCE:g}", "use 1, which is none")
    sampling.check_guidance(guidance, cfg)
    if n > 1 and cfg.d_text != cfg.dim:
        needs = f"1: texts ({cfg.d_text} wide) and images ({cfg.dim}) have no cosine to choose by"
        raise invalid("n", n, needs, "use 1 and other seeds")
    return make_solver(cfg, default_steps(cfg, solver) if steps is None else steps, solver)


def encode_texts(run: LoadedRun, texts: Sequence[str]) -> Texts:
    """Encode texts with the encoder that made the run's pairs."""
    name = find_encoder(run.cfg.pairs, run.folder)
    if name is None:
        raise UserError(
            f"no encoder is recorded for the pairs of {run.folder} ({run.cfg.pairs.images or run.cfg.pairs.source}), so a text "
            "cannot be typed. Fix: give its embedding instead (--embedding FILE.npy), or train on pairs made by `linnet data embed`."
        )
    return encode_with(open_encoder(name), texts, run.cfg.prior)


def encode_with(encoder: Encoder, texts: Sequence[str], cfg: PriorConfig) -> Texts:
    """Encode each text by itself."""
    found = [encode_prompt(encoder, text, with_encodings=cfg.text_encodings) for text in texts]
    embeds = np.stack([embed for embed, _ in found])
    if embeds.shape[1] != cfg.d_text:
        needs = f"as wide as the prior's texts, {cfg.d_text}"
        raise invalid(f"the width of the encoder {encoder.name}", embeds.shape[1], needs, "use --embedding FILE.npy")
    encodings = [truncate_encodings(encodings, cfg) for _, encodings in found]
    return Texts(
        embeds=embeds, encodings=np.stack([one for one in encodings if one is not None]) if cfg.text_encodings else None
    )


def given_texts(
    embeds: Float32[np.ndarray, "*B X"], encodings: Float32[np.ndarray, "*B L X"] | None, cfg: PriorConfig
) -> Texts:
    """Return texts that the caller has encoded: one embedding, or one per row, with its token encodings."""
    embeds = np.atleast_2d(np.asarray(embeds, np.float32))
    if embeds.ndim != 2 or not len(embeds) or embeds.shape[1] != cfg.d_text or not np.isfinite(embeds).all():
        needs = f"finite numbers in rows of {cfg.d_text}, as the prior's texts are"
        raise invalid("embedding", f"of shape {embeds.shape}", needs, "embed with its encoder")
    if encodings is not None:
        encodings = np.asarray(encodings, np.float32)
        encodings = encodings[None] if encodings.ndim == 2 else encodings
        if encodings.ndim != 3 or len(encodings) != len(embeds) or not np.isfinite(encodings).all():
            needs = f"finite numbers of shape ({len(embeds)}, positions, {cfg.d_text}): one row for each embedding"
            fix = "take both files from the same texts, as `linnet data embed` writes them"
            raise invalid("text_encodings", f"of shape {encodings.shape}", needs, fix)
    check_encodings(None if encodings is None else encodings.shape[1:], cfg, "--text-encodings")
    return Texts(embeds=embeds, encodings=encodings)


def sample_candidates(
    run: LoadedRun, texts: Texts, table: SolverTable, seeds: Sequence[int], guidance: float
) -> Float32[np.ndarray, "B n D"]:
    """Sample one candidate per text and seed. The server returns the same embeddings for the same seeds."""
    cfg, n, n_text = run.cfg.prior, len(seeds), len(texts.embeds)
    params = sampling.prepared(run.params, cfg)
    which = np.repeat(np.arange(n_text), n)
    keys = jax.vmap(rng.sample_key)(jnp.asarray(np.tile(np.asarray(seeds, np.uint32), n_text)))
    parts = [
        sampling.sample(
            params,
            jnp.asarray(texts.embeds[which[at : at + BATCH_SIZE]]),
            None if texts.encodings is None else jnp.asarray(texts.encodings[which[at : at + BATCH_SIZE]]),
            table,
            keys[at : at + BATCH_SIZE],
            cfg,
            guidance=guidance,
        )
        for at in range(0, len(which), BATCH_SIZE)
    ]
    return np.concatenate([np.asarray(part) for part in parts]).reshape(n_text, n, cfg.dim)


def sample_best(run: LoadedRun, texts: Texts, table: SolverTable, seeds: Sequence[int], guidance: float) -> Predicted:
    """Sample a candidate per seed, and choose the one most similar to each text."""
    cfg, n_text = run.cfg.prior, len(texts.embeds)
    candidates = sample_candidates(run, texts, table, seeds, guidance)
    if cfg.d_text != cfg.dim:
        return Predicted(embeds=candidates[:, 0], chosen=np.zeros(n_text, np.int64), cosines=None)
    cosines = np.einsum("bnd,bd->bn", l2_normalize(candidates), l2_normalize(texts.embeds))
    chosen = np.argmax(cosines, axis=1)
    return Predicted(embeds=candidates[np.arange(n_text), chosen], chosen=chosen, cosines=cosines)


def open_neighbors(run: LoadedRun) -> tuple[NeighborIndex | None, str | None]:
    """Return the index of the run's images, or None and the reason: an embedding is useful without it."""
    try:
        return open_neighbor_index(run.cfg.pairs, run.cfg.seed, run.cfg.prior.dim), None
    except UserError as error:
        return None, f"No nearest images: {error}"
