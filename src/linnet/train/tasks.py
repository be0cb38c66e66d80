"""Construction of a run's task."""

from __future__ import annotations

from linnet.config.schema import RunConfig
from linnet.tokenizers.base import Tokenizer
from linnet.train.task import Task


def open_task(cfg: RunConfig, tokenizer: Tokenizer | None = None) -> Task:
    """Open the run's data and return its task. Raises if the data does not fit the run.

    `tokenizer`: the tokenizer that the data must have been made with, if the run has none of its own yet.
    """
    if not cfg.reads_tokens:
        from linnet.train.prior_task import PriorTask

        return PriorTask(cfg)
    from linnet.train.lm_task import LMTask

    return LMTask(cfg, tokenizer)
