"""The subjects of the contract suite: a tiny run of every family, and of `vq` once more with experts.

No test asks a subject for its name: what is asked of a family is decided by its capabilities.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from toy.config import ToyConfig

from linnet.config.schema import OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.models import registry
from linnet.models.prior.config import PriorConfig

TOY = registry.Entry("toy.config:ToyConfig", "toy.family:FAMILY")
"""All that the package knows of the toy family."""
NAMES = ("vq", "moe", "vq-moe", "toy", "prior")
STEPS = {"optim.steps": 24, "train.eval_every": 8, "train.checkpoint_every": 8}
N_PAIR, WIDTH = 256, 16


def config(name: str, folder: Path, **changes: Any) -> RunConfig:
    """The subject's run, with its data in `folder`. `changes` are keyed by dotted names."""
    if name == "prior":
        return tiny.changed(_prior(folder), **STEPS | changes)
    base = tiny.config(tiny.corpus(folder), "moe" if name == "moe" else "vq")
    if name == "vq-moe":
        base = tiny.changed(base, **{"model.n_expert": 4})
    if name == "toy":
        base = dataclasses.replace(base, family="toy", model=ToyConfig(d_model=16))
    return tiny.changed(base, **STEPS | changes)


def _prior(folder: Path) -> RunConfig:
    return RunConfig(
        preset="tiny",
        family="prior",
        model=PriorConfig(dim=WIDTH, depth=1, n_head=2, d_head=8, timesteps=20, p_drop_ff=0.1, p_drop_attention=0.1),
        data=PairsConfig(source=str(pairs(folder)), batch_size=16),
        optim=OptimConfig(lr=3e-3, schedule="dampened_cosine", warmup_steps=4, clip=1.0, decay=1e-3, decay_by_lr=True),
        train=TrainConfig(ema_decay=0.9, log_every=5, eval_timesteps=(4,), checkpoint_minutes=0),
    )


def pairs(folder: Path) -> Path:
    """Image embeddings that are a fixed function of their text embeddings."""
    path = folder / "pairs.npz"
    if not path.exists():
        random = np.random.default_rng(0)
        text = random.standard_normal((N_PAIR, WIDTH)).astype(np.float32)
        image = np.tanh(text @ random.standard_normal((WIDTH, WIDTH)).astype(np.float32))
        text, image = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (text, image))
        np.savez(path, image_embeddings=image, text_embeddings=text)
    return path
