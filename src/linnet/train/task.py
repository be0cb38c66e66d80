"""The task interface (data, metrics, evaluation, previews), so that the training loop is independent of the data type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax

from linnet.runs.state import TrainState

TrackBatches = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Iterates over batches with a progress display (label, number of batches); raises `Interrupted` to abort."""


class Interrupted(Exception):
    """An evaluation was interrupted. Its partial result is discarded and it is repeated on resume."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    metrics: dict[str, Any]
    """Values for metrics.jsonl."""
    loss: float
    """Loss by which the best checkpoint is chosen."""
    summary: str
    """One-line summary for the terminal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainMetrics:
    metrics: dict[str, Any]
    """Values for metrics.jsonl."""
    loss: float
    """Loss for the progress display."""
    per_second: float


class Task(Protocol):
    """Data, metrics and evaluation of one run."""

    @property
    def n_validation(self) -> int: ...

    @property
    def n_test(self) -> int:
        """Number of test rows for a finished run; 0 means no test."""
        ...

    @property
    def n_per_update(self) -> int:
        """Tokens or pairs per update."""
        ...

    @property
    def unit(self) -> str:
        """Unit of the throughput."""
        ...

    @property
    def bits_per_nat(self) -> float | None:
        """Factor from the loss to bits per byte; None if not applicable."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data."""
        ...

    def save_vocabulary(self, folder: Path) -> None:
        """Save the tokenizer to the run folder, for those who load the run later."""
        ...

    def describe(self) -> dict[str, Any]:
        """Describe the data as JSON values, with a list of `warnings`."""
        ...

    def describe_amount(self) -> str:
        """Amount of training data, as text for the log."""
        ...

    def batch(self, step: int, host: int = 0, n_hosts: int = 1) -> Any:
        """Return the rows of an update that the `host`-th of `n_hosts` reads."""
        ...

    def train_metrics(self, step: int, values: dict[str, Any], rates: dict[str, float]) -> TrainMetrics:
        """Return what is logged of a step. `values`: the metrics returned by the update; `rates`: the throughput."""
        ...

    def evaluate(self, state: TrainState, track: TrackBatches) -> EvalResult: ...

    def write_sample(self, state: TrainState, step: int, folder: Path) -> None:
        """Write a sample of the model's output at this step."""
        ...

    def has_sample(self, step: int, folder: Path) -> bool:
        """Whether the sample of this step is already written (or none is needed)."""
        ...

    def test(self, state: TrainState, step: int, folder: Path, track: TrackBatches) -> EvalResult:
        """Evaluate a finished run on the test split; `folder` is the run's folder."""
        ...


def scalars(values: dict[str, jax.Array]) -> dict[str, Any]:
    """Return the scalar metrics of an update, without the loss, which each task logs under its own name."""
    return {name: value for name, value in values.items() if value.ndim == 0 and name != "loss"}
