"""Opening the task of a run."""

from __future__ import annotations

from linnet.config.schema import RunConfig
from linnet.tokenizers.base import Tokenizer
from linnet.train.task import Task


def open_task(cfg: RunConfig, tokenizer: Tokenizer | None = None) -> Task:
    """Opens the run's data, or says what is wrong with it before anything starts. `tokenizer`: what the data must be made with, where
    the run has none of its own yet."""
    if cfg.family == "prior":
        from linnet.train.prior_task import PriorTask

        return PriorTask(cfg)
    from linnet.train.lm_task import LMTask

    return LMTask(cfg, tokenizer)
