"""Asking a prior's engine: requests of toy size, and hearing all that it says."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tiny_prior import inputs, model

from linnet.models.prior.config import PriorConfig
from linnet.serve.prior.engine import PriorEngine
from linnet.serve.prior.request import Denoised, Sampled, SampleEvent, SampleRequest

SECONDS = 60.0
"""A wait that is not over by then fails."""


@contextmanager
def running(cfg: PriorConfig, *, n_slots: int = 2, **options: Any) -> Iterator[PriorEngine]:
    engine = PriorEngine(cfg, model(cfg), n_slots=n_slots, **options)
    engine.backend.warm_up()
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(within=0.0)


def wanted(cfg: PriorConfig, i: int, **more: Any) -> SampleRequest:
    """The i-th of a fixed set of texts."""
    given = inputs(cfg, i + 1)
    encodings = np.asarray(given["encodings"][i]) if cfg.text_encodings else None
    return SampleRequest(**{"id": f"r{i}", "text": np.asarray(given["text"][i]), "encodings": encodings, **more})


class RequestEvents:
    """What an engine says about one request."""

    def __init__(self, engine: PriorEngine, request: SampleRequest) -> None:
        self.events: list[SampleEvent] = []
        self._queue: queue.Queue[SampleEvent] = queue.Queue()
        engine.submit(request, self._queue.put)

    def next(self) -> SampleEvent:
        self.events.append(self._queue.get(timeout=SECONDS))
        return self.events[-1]

    def end(self) -> Sampled:
        while not isinstance(event := self.next(), Sampled):
            pass
        assert self._queue.empty(), "something was said after the end"
        return event

    def embedding(self) -> np.ndarray:
        end = self.end()
        assert end.reason == "stop", end
        assert end.embedding is not None
        return end.embedding

    @property
    def reported(self) -> list[Denoised]:
        return [event for event in self.events if isinstance(event, Denoised)]
