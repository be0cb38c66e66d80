"""`linnet sample` for a prior: predict an image embedding from a text, and find its nearest images in the run's data.

Letters: B texts, n candidates of each, L positions of token encodings, X width of text, D width of an embedding.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int64

from linnet.cli import file_names
from linnet.core import rng
from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write
from linnet.data.embeddings.load import open_gallery
from linnet.data.embeddings.neighbors import Nearest, NeighborIndex, unit
from linnet.data.embeddings.provenance import encoder_of
from linnet.data.encoders.encoder import encode_prompt
from linnet.data.encoders.load import open_encoder
from linnet.data.images import contact_sheet
from linnet.data.npy_writer import write_array
from linnet.data.sources.npy import as_float32, map_npy
from linnet.generate.samples import sheet_scale
from linnet.models.prior import sampling
from linnet.models.prior.conditions import check_encodings, cut_encodings
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.solver import Solver, SolverTable, default_steps, make_solver

if TYPE_CHECKING:
    from pathlib import Path

    from linnet.cli.sample_flags import Flags
    from linnet.runs.load import Run

AT_ONCE = 64
"""Rows per batch, which bounds the memory. Sampling is batch-invariant, so results do not depend on it."""
MAX_GUIDANCE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts to sample for."""

    embeds: Float32[np.ndarray, "B X"]
    encodings: Float32[np.ndarray, "B L X"] | None
    names: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    embeds: Float32[np.ndarray, "B D"]
    """For each text, the candidate most similar to it."""
    chosen: Int64[np.ndarray, " B"]
    cosines: Float32[np.ndarray, "B n"] | None
    """Cosines of the candidates with the text; None if text and image embeddings have different widths."""


def predict(flags: Flags, run: Run, prompt: bytes) -> int:
    cfg, solver = run.cfg.prior, flags.solver or "dpm"
    plan = _plan(flags, cfg, solver)
    texts = _texts(flags, run, prompt.decode(errors="replace").strip())
    shown = texts.names
    found = _draw(flags, run, texts, plan)
    gallery, remark = _gallery(run)
    nearest = None if gallery is None else gallery.nearest(found.embeds, flags.nearest)
    files = _write(flags, shown, found, nearest)
    if (unguided := sampling.guidance_remark(flags.guidance, cfg)) is not None:
        print(unguided, file=sys.stderr)
    if flags.json:
        record = {
            "run": str(flags.run),
            "steps": len(plan),
            "solver": solver,
            "guidance": sampling.effective_guidance(flags.guidance, cfg),
            "texts": [_record(flags, name, i, found, gallery, nearest) for i, name in enumerate(shown)],
            "files": [str(file) for file in files],
            "remark": remark,
        }
        print(json.dumps(record))
        return 0
    for i, name in enumerate(shown):
        cosine = "" if found.cosines is None else f"; cosine with the text {found.cosines[i, found.chosen[i]]:.3f}"
        print(f"{name} (seed {flags.seed + int(found.chosen[i])}{cosine})")
        if nearest is not None:
            for k, near in enumerate(nearest.cosines[i]):
                caption = "" if nearest.captions is None else f"  {nearest.captions[i][k]}"
                print(f"  {near:.3f}{caption or f'  row {nearest.rows[i, k]}'}")
    print(remark or "", end="\n" if remark else "")
    print("Written: " + ", ".join(str(file) for file in files))
    return 0


def _plan(flags: Flags, cfg: PriorConfig, solver: Solver) -> SolverTable:
    """Validate the flags and return the solver table, before anything is computed."""
    if flags.nearest < 1:
        raise invalid("--nearest", flags.nearest, "at least 1", "use 8")
    if not 0 <= flags.guidance <= MAX_GUIDANCE:
        raise invalid("--guidance", flags.guidance, f"0 to {MAX_GUIDANCE:g}", "use 1, which is none")
    sampling.check_guidance(flags.guidance, cfg)
    if flags.n > 1 and cfg.d_text != cfg.dim:
        needs = f"1: texts ({cfg.d_text} wide) and images ({cfg.dim}) have no cosine to choose by"
        raise invalid("--n", flags.n, needs, "use 1 and other seeds")
    steps = default_steps(cfg, solver) if flags.steps is None else flags.steps
    return make_solver(cfg, steps, solver)


def _texts(flags: Flags, run: Run, prompt: str) -> Texts:
    """Read the texts from the given files, or encode the prompt."""
    cfg = run.cfg.prior
    if flags.embedding is not None:
        if prompt:
            raise invalid("--embedding", str(flags.embedding), "given without a prompt", "leave one of them out")
        return _given(flags.embedding, flags.text_encodings, cfg)
    if flags.text_encodings is not None:
        needs = "left out without --embedding: those of a prompt are computed"
        raise invalid("--text-encodings", str(flags.text_encodings), needs, "leave it out, or add --embedding FILE.npy")
    if not prompt:
        raise invalid("--prompt", prompt, "a text for the prior to read", "use --prompt TEXT, or --embedding FILE.npy")
    name = encoder_of(run.cfg.pairs, run.folder)
    if name is None:
        raise UserError(
            f"nobody noted which encoder made the pairs of {flags.run} ({run.cfg.pairs.images or run.cfg.pairs.source}), so a text "
            "cannot be typed. Fix: give its embedding with --embedding FILE.npy, or train on pairs made by `linnet data embed`."
        )
    embed, encodings = encode_prompt(open_encoder(name), prompt, with_encodings=cfg.text_encodings)
    if len(embed) != cfg.d_text:
        needs = f"as wide as the prior's texts, {cfg.d_text}"
        raise invalid(f"the width of the encoder {name}", len(embed), needs, "use --embedding FILE.npy")
    encodings = cut_encodings(encodings, cfg)
    return Texts(embeds=embed[None], encodings=None if encodings is None else encodings[None], names=[prompt])


def _given(embedding: Path, text_encodings: Path | None, cfg: PriorConfig) -> Texts:
    values = np.atleast_2d(_read("--embedding", embedding))
    if values.ndim != 2 or not len(values) or values.shape[1] != cfg.d_text or not np.isfinite(values).all():
        needs = f"finite numbers in rows of {cfg.d_text}, as the prior's texts are"
        raise invalid("--embedding", f"{embedding}, {values.shape}", needs, "embed with its encoder")
    encodings = None if text_encodings is None else _read("--text-encodings", text_encodings)
    if encodings is not None:
        encodings = encodings[None] if encodings.ndim == 2 else encodings
        if encodings.ndim != 3 or len(encodings) != len(values) or not np.isfinite(encodings).all():
            needs = f"finite numbers of shape ({len(values)}, positions, {cfg.d_text}): one row for each embedding"
            fix = "take both files from the same texts, as `linnet data embed` writes them"
            raise invalid("--text-encodings", f"{text_encodings}, {encodings.shape}", needs, fix)
    check_encodings(None if encodings is None else encodings.shape[1:], cfg, "--text-encodings")
    names = [embedding.stem] if len(values) == 1 else [f"{embedding.stem}[{i}]" for i in range(len(values))]
    return Texts(embeds=values, encodings=encodings, names=names)


def _read(flag: str, path: Path) -> Float32[np.ndarray, ...]:
    try:
        return as_float32(map_npy(path), str(path))
    except (ValueError, TypeError) as error:
        needs = f"an .npy file of numbers ({error})"
        raise invalid(flag, str(path), needs, "check the path") from None


def _draw(flags: Flags, run: Run, given: Texts, plan: SolverTable) -> Predicted:
    """Sample the candidates. Candidate i uses seed + i, as in the server."""
    cfg, n, texts = run.cfg.prior, flags.n, given.embeds
    params = sampling.prepared(run.params, cfg)
    which = np.repeat(np.arange(len(texts)), n)
    seeds = np.tile([(flags.seed + i) % 2**32 for i in range(n)], len(texts)).astype(np.uint32)
    keys = jax.vmap(rng.sample_key)(jnp.asarray(seeds))
    parts = [
        sampling.sample(
            params,
            jnp.asarray(texts[which[at : at + AT_ONCE]]),
            None if given.encodings is None else jnp.asarray(given.encodings[which[at : at + AT_ONCE]]),
            plan,
            keys[at : at + AT_ONCE],
            cfg,
            guidance=flags.guidance,
        )
        for at in range(0, len(which), AT_ONCE)
    ]
    candidates = np.concatenate([np.asarray(part) for part in parts]).reshape(len(texts), n, cfg.dim)
    if cfg.d_text != cfg.dim:
        return Predicted(embeds=candidates[:, 0], chosen=np.zeros(len(texts), np.int64), cosines=None)
    cosines = np.einsum("bnd,bd->bn", unit(candidates), unit(texts))
    chosen = np.argmax(cosines, axis=1)
    return Predicted(embeds=candidates[np.arange(len(texts)), chosen], chosen=chosen, cosines=cosines)


def _gallery(run: Run) -> tuple[NeighborIndex | None, str | None]:
    """Return the index of the run's images, or None and the reason: an embedding is useful without it."""
    try:
        return open_gallery(run.cfg.pairs, run.cfg.seed, run.cfg.prior.dim), None
    except UserError as error:
        return None, f"No nearest pictures: {error}"


def _write(flags: Flags, shown: list[str], found: Predicted, nearest: Nearest | None) -> list[Path]:
    """Write the embeddings and, if the data has images, a contact sheet with one row per text, the nearest image first."""
    words = shown[0] if len(shown) == 1 else shown[0].split("[")[0]
    folder = flags.out or flags.run / "samples"
    place = folder / f"{file_names.slugify(words.strip(), 'prior')}-seed{flags.seed}.npy"
    write_array(place, found.embeds)
    if nearest is None or nearest.pictures is None:
        return [place]
    n_row, k, height, width, channels = nearest.pictures.shape
    pictures = nearest.pictures.reshape(n_row * k, height, width, channels)
    sheet = place.with_suffix(".png")
    atomic_write(sheet, contact_sheet(pictures, k, sheet_scale((height, width, channels))))
    return [place, sheet]


def _record(
    flags: Flags, name: str, i: int, found: Predicted, gallery: NeighborIndex | None, nearest: Nearest | None
) -> dict[str, Any]:
    near = []
    if gallery is not None and nearest is not None:
        for k, cosine in enumerate(nearest.cosines[i]):
            caption = None if nearest.captions is None else nearest.captions[i][k]
            row = int(gallery.source_rows[nearest.rows[i, k]])
            near.append({"row": row, "cosine": float(cosine), "caption": caption})
    return {
        "text": name,
        "seed": (flags.seed + int(found.chosen[i])) % 2**32,
        "cosines_with_text": None if found.cosines is None else found.cosines[i].tolist(),
        "embedding": found.embeds[i].tolist(),
        "nearest": near,
    }
