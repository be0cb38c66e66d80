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
    """The bits that weights are held in. Below 32 both are evaluated, and the difference is printed."""
    source: str | None = None
    """Other data to evaluate on: prepared data (its `split`), or a text file, folder or glob, read whole. For a prior: other pairs
    of embeddings, all of them."""
    sequence_len: int | None = None
    """Tokens of one sequence, after which the state is reset; the run's own if not given. The loss depends on it."""
    update_len: int | None = None
    """Tokens that are computed together; the run's own if not given. It changes speed and memory only."""
    data_source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """Where the run's own data is now. Its content must be what the run was trained on."""
    batch_size: int | None = None
    limit: int | None = None
    """Only so many sequences (or pairs), spread over the split."""
    timesteps: tuple[int, ...] | None = None
    """A prior: numbers of denoising steps to predict embeddings in; those of its training if not given."""
    json: bool = False
    """Print one JSON object."""
