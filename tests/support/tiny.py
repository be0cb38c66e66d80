"""A run so small that training it takes a second: every option on, so that nothing is left out of what must be exact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from linnet.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig
from linnet.models.moe.config import MoEConfig
from linnet.models.vq.config import VQConfig

MODEL = VQConfig(
    d_model=16,
    d_k=8,
    d_v=16,
    n_head=2,
    n_code=8,
    n_layer=1,
    block_len=8,
    mem_len=8,
    p_dropemb=0.1,
    p_dropsin=0.1,
    p_dropres=0.1,
    p_droplyr=0.1,
    restart_dead_codes=True,
    dead_code_below=0.5,
)

MOE = MoEConfig(
    d_model=16,
    d_k=8,
    n_q_head=2,
    n_kv_head=1,
    n_layer=2,
    n_expert=4,
    n_choice=2,
    widening=1.5,
    context=32,
    embed_scale=4.0,
    score_scale=8**-0.5,
)
FAMILIES: tuple[Literal["vq", "moe"], ...] = ("vq", "moe")
FAMILY_PARTS: dict[str, dict[str, Any]] = {
    "vq": {"model": MODEL, "lengths": {"sequence_len": 32, "update_len": 16}},
    "moe": {"model": MOE, "lengths": {"sequence_len": 16, "update_len": 16}},
}


def corpus(folder: Path, n_bytes: int = 6000) -> Path:
    """Words in an order that never repeats exactly, and never changes."""
    path = folder / "corpus.txt"
    words = ["linear", "time", "attention", "codes", "window", "table", "exact"]
    text = " ".join(words[(i * i + i // 3) % len(words)] for i in range(n_bytes // 5))
    path.write_text(text[:n_bytes])
    return path


def config(source: Path, family: Literal["vq", "moe"] = "vq", /, **changes: Any) -> RunConfig:
    """`changes` are keyed by dotted names: `config(p, **{"optim.steps": 10})`."""
    parts = FAMILY_PARTS[family]
    cfg = RunConfig(
        preset="tiny",
        family=family,
        model=parts["model"],
        data=DataConfig(source=str(source), batch_size=4, **parts["lengths"]),
        optim=OptimConfig(lr=3e-3, warmup_steps=4, steps=40, clip=1.0, decay=1e-3),
        train=TrainConfig(
            ema_decay=0.9,
            log_every=5,
            eval_every=10,
            eval_sequences=4,
            checkpoint_every=10,
            checkpoint_minutes=0,
            sample_tokens=0,
        ),
    )
    return changed(cfg, **changes)


def changed(cfg: RunConfig, /, **changes: Any) -> RunConfig:
    """The run with other settings, keyed by dotted names."""
    for name, value in changes.items():
        part, _, field = name.partition(".")
        if field:
            cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(getattr(cfg, part), **{field: value})})
        else:
            cfg = dataclasses.replace(cfg, **{part: value})
    return cfg
