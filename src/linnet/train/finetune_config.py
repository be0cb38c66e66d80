"""Default settings of a fine-tuned run: those of its parent, with a schedule for fine-tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

from linnet.config.schema import DataConfig, OptimConfig, PairsConfig, RunConfig
from linnet.config.tuning import LoraConfig, Parent

STEPS = 1000
"""Upper bound on the default number of steps; the parent may have been trained for many more."""
LR_SHARE = 0.3
"""Fraction of the parent's peak learning rate. The rate of a parent that is itself fully fine-tuned is kept unchanged."""
LORA_LR, LORA_LR_BY_WIDTH = 5e-3, 0.6
"""Learning rate of adapters: min(LORA_LR, LORA_LR_BY_WIDTH / d_model). Wider models need smaller rates."""
WARMUP_SHARE, MAX_WARMUP = 0.05, 100


def tuned_config(
    theirs: RunConfig, parent: Parent, *, steps: int | None = None, lora: bool = False, other_data: bool = False
) -> RunConfig:
    """Return the default config of a run that is fine-tuned from `parent`.

    `steps`: steps of the new run, if given (they also set the warm-up). `other_data`: the run trains on another source than its
    parent.
    """
    optim = _optim(theirs, min(theirs.optim.steps, STEPS) if steps is None else max(steps, 1), lora)
    data: Any = _without_source(theirs.data) if other_data else theirs.data
    train = dataclasses.replace(theirs.train, exports=())  # never overwrite the parent's export files
    return dataclasses.replace(theirs, optim=optim, data=data, train=train, lora=LoraConfig(), parent=parent)


def _optim(theirs: RunConfig, steps: int, lora: bool) -> OptimConfig:
    warmup = min(MAX_WARMUP, int(WARMUP_SHARE * steps))
    if lora:
        lr = min(LORA_LR, LORA_LR_BY_WIDTH / getattr(theirs.model, "d_model", 1))  # a prior is rejected later
        return OptimConfig(name="adamw", lr=lr, schedule="cosine", steps=steps, warmup_steps=warmup, clip=1.0)
    own = theirs.optim
    # Adapters are trained at a higher rate than the weights they are merged into.
    tuned_whole = theirs.parent is not None and not (theirs.lora.rank or theirs.parent.adapters)
    lr = own.lr if tuned_whole else own.lr * LR_SHARE
    return dataclasses.replace(own, lr=lr, schedule="cosine", steps=steps, warmup_steps=warmup, extra_steps=0)


def _without_source(data: DataConfig | PairsConfig) -> DataConfig | PairsConfig:
    """Keep lengths and batch size; held-out files and reading options belong to the parent's source and are reset."""
    if isinstance(data, PairsConfig):
        return PairsConfig(batch_size=data.batch_size, mix=data.mix)
    kept = {name: getattr(data, name) for name in ("sequence_len", "update_len", "batch_size", "condition")}
    return DataConfig(**kept)
