"""What a caller asks a prior for, and what it hears: plain values. Letters: X width of text, L text tokens, D width."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from linnet.core.errors import invalid
from linnet.models.prior.solver import Solver
from linnet.serve.request import MAX_SEED, TerminalEvent

MAX_GUIDANCE = 100.0
MAX_VALUE = 1e4
"""Of a vector that is given: embeddings have length 1 or so, and much larger ones would leave the range of numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """One embedding. Several candidates for one text are several requests, with seeds of their own."""

    id: str
    text: Float32[np.ndarray, " X"]
    encodings: Float32[np.ndarray, "L X"] | None = None
    steps: int | None = None
    """None: as many as the solver usually takes."""
    solver: Solver = "dpm"
    eta: float = 1.0
    """Of DDIM: 0 adds no noise on the way."""
    guidance: float = 1.0
    seed: int = 0
    n_told: int = 0
    """So many times on the way, at even distances, the start as it is predicted then is told."""
    priority: int = 0
    deadline: float | None = None
    """On the engine's clock."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise invalid("seed", self.seed, f"0 to {MAX_SEED}", "use 0")
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise invalid("guidance", self.guidance, f"0 to {MAX_GUIDANCE:g}", "use 1, which is none")
        if self.n_told < 0:
            raise invalid("n_told", self.n_told, "0 or more", "use 0")
        for name, values in (("the embedding", self.text), ("the encodings", self.encodings)):
            if values is not None and not (np.abs(values) <= MAX_VALUE).all():
                needs = f"finite, and of size {MAX_VALUE:g} at most"
                raise invalid(name, "a number beyond that", needs, "scale it to length 1, as encoders give it")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Denoised:
    """So far it is."""

    step: int
    n_steps: int
    start: Float32[np.ndarray, " D"]
    """As predicted at this step."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled(TerminalEvent):
    """The end: the embedding, where there is one."""

    embedding: Float32[np.ndarray, " D"] | None
    n_steps: int
    """As the solver takes them: few more or fewer than were asked for."""
    guidance: float = 1.0
    """As applied: 1 where the model cannot be guided, whatever was asked for."""


SampleEvent = Denoised | Sampled
OnSampleEvent = Callable[[SampleEvent], None]
"""Called in the engine's thread: must return at once and never raise."""
