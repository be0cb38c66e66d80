"""Text and image samples, such as those written during training to the run's `samples` folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, UInt8

from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.core.files import atomic_write
from linnet.core.special_tokens import FIRST_BYTE, N_BYTE_IDS
from linnet.data.images import contact_sheet, ids_to_pixels
from linnet.models.base import TokenFamily
from linnet.models.generate import generate
from linnet.models.tensor_parallel import on_mesh_of
from linnet.nn.sampling import SamplingSettings, sampling_settings
from linnet.runs.vocabulary import Vocabulary

TOP_P = 0.9
N_PICTURES, SHEET_COLUMNS, SHEET_SIDE = 8, 8, 64
"""Images per sample, columns of the contact sheet, and approximate width of each image in pixels."""


def write_sample(
    family: TokenFamily,
    cfg: RunConfig,
    params: Any,
    buffers: Any,
    vocabulary: Vocabulary,
    folder: Path,
    step: int,
    n_tokens: int,
    embeds: Float32[np.ndarray, "n E"] | None = None,
) -> Path:
    """Write a sample of the model and return its path.

    Every step uses the run's seed, so that samples of different steps can be compared. Images are always generated completely; a
    conditional model uses some of the given `embeds`. All processes must call this, since each holds its shards of the weights; only
    process 0 writes.
    """
    writes, path = jax.process_index() == 0, sample_path(folder, step, vocabulary.shape)
    if vocabulary.shape is not None:
        seeds = [(cfg.seed + i) % 2**32 for i in range(N_PICTURES)]
        settings = sampling_settings(N_PICTURES)
        seen = [b""] * N_PICTURES
        if embeds is not None:
            embeds = embeds[[i * len(embeds) // N_PICTURES for i in range(N_PICTURES)]] if len(embeds) else None
        images = sample_images(family, cfg, params, buffers, vocabulary.shape, seen, settings, seeds, embeds)
        if writes:
            atomic_write(path, contact_sheet(images, SHEET_COLUMNS, sheet_scale(vocabulary.shape)))
        return path
    text = sample_text(family, cfg, params, buffers, vocabulary, prompt="", n_tokens=n_tokens, seed=cfg.seed)
    if writes:
        atomic_write(path, text.encode())
    return path


def sample_path(folder: Path, step: int, shape: tuple[int, int, int] | None) -> Path:
    return folder / f"step_{step:08d}.{'txt' if shape is None else 'png'}"


def sample_text(
    family: TokenFamily,
    cfg: RunConfig,
    params: Any,
    buffers: Any,
    vocabulary: Vocabulary,
    *,
    prompt: str,
    n_tokens: int,
    seed: int,
) -> str:
    ids = vocabulary.tokenizer.encode(prompt.encode()).tolist()
    if not ids and cfg.lm.bos_id is None:
        # Without a BOS token, a new document starts after the EOS of the previous one.
        ids = [cfg.lm.end_id]
    pieces = generate(
        family.decoder,
        params,
        buffers,
        cfg.model,
        [ids],
        max_tokens=n_tokens,
        settings=sampling_settings(1, top_p=TOP_P),
        seeds=[seed],
        ignore_end=True,
        text_rules=vocabulary.tokenizer.text_rules,
    )
    return prompt + "".join(piece.text for row in pieces for piece in row if piece is not None)


def sample_images(
    family: TokenFamily,
    cfg: RunConfig,
    params: Any,
    buffers: Any,
    shape: tuple[int, int, int],
    seen: Sequence[bytes],
    settings: SamplingSettings,
    seeds: Sequence[int],
    embeds: Float32[np.ndarray, "n E"] | None = None,
    guidance: float = 1.0,
) -> UInt8[np.ndarray, "n h w 3"]:
    """Generate images that start with the given values, the same number for each.

    Special tokens are never sampled, only pixel values. `embeds`: unit-norm conditioning embedding per image; `guidance`:
    classifier-free guidance scale, 1 for none.
    """
    decoder, states = family.decoder, None
    if embeds is not None:
        decoder = _conditional(family, guidance)
        states = told_states(decoder, params, embeds, cfg.model)
    size, n_seen = int(np.prod(shape)), len(seen[0])
    ids = [[value + FIRST_BYTE for value in values] for values in seen]
    if n_seen < size:
        pieces = generate(
            decoder,
            params,
            buffers,
            cfg.model,
            [list(prompt) for prompt in ids],
            max_tokens=size - n_seen,
            settings=settings,
            seeds=seeds,
            ignore_end=True,
            allowed=range(FIRST_BYTE, N_BYTE_IDS),
            states=states,
        )
        for row in pieces:
            for i, piece in enumerate(row):
                ids[i] += [] if piece is None else piece.tokens
    pixels, _ = ids_to_pixels(np.array(ids, np.int32), (len(ids), *shape))
    return pixels


def _conditional(family: TokenFamily, guidance: float) -> Any:
    """Return the decoder of a conditional model, with classifier-free guidance unless the scale is 1."""
    decoder = family.decoder
    if decoder.conditioned_state is None or (guidance != 1.0 and decoder.guided is None):
        raise invalid("family", family.name, "one whose models are conditioned on embeddings", "use a run of vq")
    return decoder if guidance == 1.0 or decoder.guided is None else decoder.guided(guidance)


def told_states(decoder: Any, params: Any, embeds: Float32[np.ndarray, "n E"], cfg: Any) -> list[Any]:
    """Return a conditioned decoder state per row; equal rows share one."""
    decoder = on_mesh_of(decoder, params)
    states: dict[bytes, Any] = {}
    for embed in embeds:
        if embed.tobytes() not in states:
            states[embed.tobytes()] = decoder.conditioned_state(params, embed, cfg)
    return [states[embed.tobytes()] for embed in embeds]


def sheet_scale(shape: tuple[int, int, int]) -> int:
    return max(1, SHEET_SIDE // shape[1])
