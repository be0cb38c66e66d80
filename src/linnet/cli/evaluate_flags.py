"""Flags of `linnet eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from linnet.cli.flags import Layout
from linnet.core.dtypes import WeightDtype


@dataclasses.dataclass(frozen=True)
class Flags:
    layout: ClassVar[Layout] = {
        "": ("split", "source", "limit", "batch-size", "timesteps", "json"),
        "model": ("checkpoint", "weights"),
        "data": ("sequence-len", "update-len", "data.source"),
    }
    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    split: Literal["train", "validation", "test"] = "validation"
    """Split of the data to evaluate on."""
    checkpoint: str = "best"
    """Checkpoint to load: best (by validation loss; the latest if none was evaluated), latest, or a step."""
    weights: WeightDtype = "float32"
    """Weight dtype. If it is not float32, float32 is evaluated too and the difference is printed."""
    source: str | None = None
    """Evaluate on other data: prepared data (its --split), or all of a text file, folder or glob; for a prior, all pairs of
    another embedding dataset. Default: the run's own data."""
    sequence_len: int | None = None
    """Sequence length in tokens, after which the state is reset. The loss depends on it. Default: that of the run."""
    update_len: int | None = None
    """Tokens per sequence that are processed together. Affects speed and memory only. Default: that of the run."""
    data_source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """New location of the run's data, if it was moved. The content must be that of training. Default: its recorded location."""
    batch_size: int | None = None
    """Number of sequences (or pairs) per batch. Affects speed and memory only. Default: that of the run."""
    limit: int | None = None
    """Maximum number of sequences (or pairs), spread evenly over the split. Default: all."""
    timesteps: tuple[int, ...] | None = None
    """Priors: numbers of sampling steps to evaluate. Default: train.eval_timesteps of the run."""
    json: bool = False
    """Print one JSON object instead of text."""
