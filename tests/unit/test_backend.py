"""The backend: once it is warm, nothing that a request may do is compiled any more."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from engine_asks import MODELS, Asked, request, running_engine

from linnet.serve import state as states
from linnet.serve.backend import N_TICKS, Backend
from linnet.serve.request import Sampling


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX says that it compiles meanwhile."""
    names: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words = record.getMessage()
            if words.startswith("Compiling"):
                names.append(words.split(" with ")[0])

    listener, logger = Listener(), logging.getLogger("jax")
    logger.addHandler(listener)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(listener)


@pytest.mark.parametrize("name", ["vq", "moe"])
def test_a_request_waits_for_no_compiler(name: str) -> None:
    model = MODELS[name]
    params, buffers = jax.device_put((model.params, model.buffers), jax.devices()[0])  # as they come from a checkpoint
    backend = Backend(model.family, model.cfg, params, buffers, 3)
    backend.warm_up()
    with compilations() as compiled:
        _a_life(backend, from_file=False)
        _a_life(backend, from_file=True)
    assert compiled == []


def _a_life(backend: Backend, *, from_file: bool) -> None:
    """All that the engine may do with a request."""
    memory = backend.empty_memory()
    for n in (backend.chunk_len, backend.chunk_len, 5):
        memory = backend.read_chunk(memory, [7] * n)
    if from_file:
        memory = backend.placed(jax.tree.map(np.asarray, memory))
        memory = backend.read_chunk(memory, [8] * 40)
    seat = backend.seat(memory, 9, 2 * backend.chunk_len + 5 + 40 * from_file)
    sampling = Sampling(temperature=0.5, top_k=5, repetition_penalty=1.2, logit_bias={5: 1.0}, seed=2**32 - 1)
    backend.rule(1, seat, sampling, (7, 8), frozenset({1}))
    backend.begin(1, seat)
    for n_ticks, with_top in ((N_TICKS, False), (N_TICKS, True), (1, False), (3, True)):
        backend.dispatch(n_ticks, [1], with_top=with_top, keep=[1])
    assert backend.restrict(1, np.ones((backend.cfg.n_vocab,), bool))
    ticket = backend.dispatch(1, [1], with_top=True, keep=[1])
    parked = backend.take(1, seat.n_read)
    backend.put(2, parked)
    backend.rule(2, parked, sampling, (), frozenset())
    backend.memory_after(ticket.before[1], [7, 8])
    jax.block_until_ready(backend.dispatch(N_TICKS, [2], with_top=False, keep=[]).tokens)


def test_a_state_from_a_file_is_no_program_of_its_own() -> None:
    with running_engine() as engine:
        engine.backend.warm_up()
        state = Asked(engine, request("hello", return_state=True)).answer().end.state
        again = states.from_bytes(states.to_bytes(state), engine.backend.abstract_state, engine.fingerprint)
        warm = Asked(engine, request(" more", state=state)).answer()
        with compilations() as compiled:
            told = Asked(engine, request(" more", state=again)).answer()
        assert told.tokens == warm.tokens
        assert compiled == []


def test_no_tick_is_asked_for_beyond_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as engine:
        real, asked = engine.backend.dispatch, []
        monkeypatch.setattr(engine.backend, "dispatch", lambda n, *rest, **kw: asked.append(n) or real(n, *rest, **kw))
        for max_tokens in (1, 2, 1 + N_TICKS, 4 + N_TICKS):
            asked.clear()
            answer = Asked(engine, request("x", max_tokens=max_tokens, ignore_end=True)).answer()
            assert len(answer.tokens) == max_tokens == 1 + sum(asked)
            assert len(asked) == -(-(max_tokens - 1) // N_TICKS)
