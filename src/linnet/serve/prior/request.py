"""Requests to a prior and the events it emits: plain values. Letters: X width of text, L text tokens, D width."""

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
"""Maximum magnitude in an input vector. Embeddings have a norm of about 1, and much larger values would overflow."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """A request for one embedding. Several candidates for one text are several requests with different seeds."""

    id: str
    text: Float32[np.ndarray, " X"]
    encodings: Float32[np.ndarray, "L X"] | None = None
    steps: int | None = None
    """None: the solver's default."""
    solver: Solver = "dpm"
    eta: float = 1.0
    """DDIM's eta: 0 adds no noise between steps."""
    guidance: float = 1.0
    seed: int = 0
    n_progress: int = 0
    """Number of evenly spaced progress events with the predicted clean embedding."""
    priority: int = 0
    deadline: float | None = None
    """Time on the engine's clock."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise invalid("seed", self.seed, f"0 to {MAX_SEED}", "use 0")
        if not 0 <= self.guidance <= MAX_GUIDANCE:
            raise invalid("guidance", self.guidance, f"0 to {MAX_GUIDANCE:g}", "use 1 for no guidance")
        if self.n_progress < 0:
            raise invalid("n_progress", self.n_progress, "0 or more", "use 0")
        for name, values in (("the embedding", self.text), ("the encodings", self.encodings)):
            if values is not None and not (np.abs(values) <= MAX_VALUE).all():
                needs = f"finite, with a magnitude of at most {MAX_VALUE:g}"
                raise invalid(name, "out of range", needs, "scale it to norm 1, as encoders return it")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Denoised:
    """Progress of a request."""

    step: int
    n_steps: int
    start: Float32[np.ndarray, " D"]
    """The clean embedding predicted at this step."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled(TerminalEvent):
    """Terminal event, with the embedding if there is one."""

    embedding: Float32[np.ndarray, " D"] | None
    n_steps: int
    """Steps the solver takes, which may differ slightly from the number requested."""
    guidance: float = 1.0
    """Guidance scale as applied: always 1 if the model does not support guidance."""


SampleEvent = Denoised | Sampled
OnSampleEvent = Callable[[SampleEvent], None]
"""Called in the engine's thread: must return immediately and never raise."""
