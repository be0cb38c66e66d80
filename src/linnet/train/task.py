"""The task interface (data, metrics, evaluation, previews), so that the training loop is independent of the data type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax

from linnet.runs.state import TrainState

Watch = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Goes through batches (of what, and how many) showing how far it is; raises `Interrupted` to leave them."""


class Interrupted(Exception):
    """An evaluation was interrupted. Nothing of it is kept: it is repeated when the run is resumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    record: dict[str, Any]
    """For metrics.jsonl."""
    loss: float
    """What the best checkpoint is chosen by."""
    words: str
    """A line for whoever watches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainMetrics:
    record: dict[str, Any]
    loss: float
    """What the progress shows."""
    per_second: float


class Task(Protocol):
    """Of one run and its data."""

    @property
    def n_validation(self) -> int: ...

    @property
    def n_test(self) -> int:
        """What a finished run is tested on; 0: nothing."""
        ...

    @property
    def n_per_update(self) -> int:
        """Tokens, or pairs."""
        ...

    @property
    def unit(self) -> str:
        """Of which so many are read a second."""
        ...

    @property
    def bits_per_nat(self) -> float | None:
        """From the loss to bits per byte, where that means something."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the data."""
        ...

    def keep(self, folder: Path) -> None:
        """Whatever later readers of the run need of its data."""
        ...

    def describe(self) -> dict[str, Any]:
        """The data in plain values, with `warnings`."""
        ...

    def amount(self) -> str:
        """How much there is to train on, in words."""
        ...

    def batch(self, step: int, share: int = 0, n_shares: int = 1) -> Any:
        """One of so many equal shares of an update's rows."""
        ...

    def logged(self, step: int, values: dict[str, Any], rates: dict[str, float]) -> TrainMetrics:
        """A line about training: `values` as an update gave them."""
        ...

    def evaluate(self, state: TrainState, watch: Watch) -> EvalResult: ...

    def show(self, state: TrainState, step: int, folder: Path) -> None:
        """What the model makes at this step, for people to look at."""
        ...

    def has_sample(self, step: int, folder: Path) -> bool:
        """Whether `show` has nothing left to write for this step."""
        ...

    def test(self, state: TrainState, step: int, folder: Path, watch: Watch) -> EvalResult:
        """What a finished run says of data it never saw; `folder` is the run's."""
        ...


def scalars(values: dict[str, jax.Array]) -> dict[str, Any]:
    """What an update tells in single numbers; its loss has a name of its own in each family."""
    return {name: value for name, value in values.items() if value.ndim == 0 and name != "loss"}
