"""Flags of `linnet eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from linnet.core.dtypes import WeightDtype

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True)
class Flags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    split: Literal["train", "validation", "test"] = "validation"
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""
    weights: WeightDtype = "float32"
    """Weight dtype. If not float32, float32 is evaluated too and the difference is printed."""
    source: str | None = None
    """Other data to evaluate on: prepared data (its `split`), or all of a text file, folder or glob. For a prior: all pairs of
    another embedding dataset."""
    sequence_len: int | None = None
    """Tokens per sequence, after which the state is reset. Default: that of the run. The loss depends on it."""
    update_len: int | None = None
    """Tokens computed together. Default: that of the run. Affects speed and memory only."""
    data_source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """New location of the run's own data. The content must be that of training."""
    batch_size: int | None = None
    limit: int | None = None
    """Maximum number of sequences (or pairs), spread evenly over the split."""
    timesteps: tuple[int, ...] | None = None
    """Prior: numbers of sampling steps to evaluate. Default: train.eval_timesteps of the run."""
    json: bool = False
    """Print one JSON object."""
