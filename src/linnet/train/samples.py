"""Samples of a run: what a model writes while it learns, kept beside its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.config import RunConfig
from linnet.families.family import Family
from linnet.families.generate import byte_ids, generate
from linnet.nn.sampling import sampling_settings

TOP_P = 0.9


def write_sample(
    family: Family, cfg: RunConfig, params: Any, buffers: Any, folder: Path, step: int, n_tokens: int
) -> Path:
    """The run's seed draws it at every step, so that samples of different steps can be compared."""
    text = sample_text(family, cfg, params, buffers, prompt="", n_tokens=n_tokens, seed=cfg.seed)
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{step:08d}.txt"
    path.write_text(text)
    return path


def sample_text(
    family: Family, cfg: RunConfig, params: Any, buffers: Any, *, prompt: str, n_tokens: int, seed: int
) -> str:
    pieces = generate(
        family.decoder,
        params,
        buffers,
        cfg.model,
        [byte_ids(prompt)],
        max_tokens=n_tokens,
        settings=sampling_settings(1, top_p=TOP_P),
        seeds=[seed],
        ignore_end=True,
    )
    return prompt + "".join(piece.text for row in pieces for piece in row if piece is not None)
