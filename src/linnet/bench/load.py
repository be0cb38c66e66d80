"""An engine to benchmark, and a load generator."""

from __future__ import annotations

import gc
import itertools
import queue
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linnet.config.schema import RunConfig
from linnet.core.special_tokens import FIRST_BYTE
from linnet.models import registry
from linnet.serve.engine import Engine, EngineConfig
from linnet.serve.request import Event, Finished, OnEvent, Request, Sampling
from linnet.tokenizers.base import BytesTokenizer

N_SLOTS = 8
ANSWER = 256
"""Mean tokens per response. A finished request frees its slot for the next, as in a server."""


@contextmanager
def running_engine(cfg: RunConfig, params: Any, buffers: Any, n_slots: int) -> Iterator[Engine]:
    config = EngineConfig(n_slots=n_slots, prefix_bytes=0)
    engine = Engine(registry.tokens(cfg.family), cfg.model, params, buffers, BytesTokenizer(), config)
    engine.backend.warm_up()
    gc.collect()
    gc.freeze()  # as the server does
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(within=0.0)
        gc.unfreeze()


_numbers = itertools.count()


def vary_length(answer: int, number: int) -> int:
    """Vary the length from 0.5 to 1.5 times `answer`, so that responses which start together do not end together."""
    return answer // 2 + 37 * number % answer + 1


def submit_request(engine: Engine, prompt: tuple[int, ...], n_tokens: int, on_event: OnEvent) -> str:
    """Submit a request that ends only by its length."""
    id = f"bench-{next(_numbers)}"
    engine.submit(Request(id=id, prompt=prompt, sampling=Sampling(max_tokens=n_tokens, ignore_eos=True)), on_event)
    return id


def random_prompt(n: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(FIRST_BYTE, FIRST_BYTE + 256), k=n))


class Load:
    """Keeps twice as many requests as slots in the engine: each finished request is replaced by another."""

    def __init__(self, engine: Engine, answer: int = ANSWER) -> None:
        self._engine, self._answer = engine, answer
        self._running: set[str] = set()
        self._finished: queue.Queue[None] = queue.Queue()

    def start(self) -> None:
        """Submit the requests and wait until every slot is busy."""
        n_slots = self._engine.config.n_slots
        for _ in range(2 * n_slots):
            self._submit()
        until = time.perf_counter() + 60.0
        while self._engine.stats()["running"] < n_slots and time.perf_counter() < until:
            self.feed(0.005)

    def feed(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            try:
                self._finished.get(timeout=left)
            except queue.Empty:
                return
            self._submit()

    def stop(self) -> None:
        """Cancel all requests and wait until the engine is idle."""
        for id in list(self._running):
            self._engine.cancel(id)
        while self._running:
            time.sleep(0.001)
        while not self._finished.empty():
            self._finished.get()

    def _submit(self) -> None:
        number = next(_numbers)
        id = f"load-{number}"

        def on_event(event: Event) -> None:
            if isinstance(event, Finished):
                self._running.discard(id)
                self._finished.put(None)

        self._running.add(id)
        sampling = Sampling(max_tokens=vary_length(self._answer, number), ignore_eos=True, seed=number)
        self._engine.submit(Request(id=id, prompt=random_prompt(16, number), sampling=sampling), on_event)
