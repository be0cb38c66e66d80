"""The backend: after its warm-up, no request compiles a program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from engine_requests import MODELS, PendingRequest, request, running_engine
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet.serve import state as states
from linnet.serve.backend import N_TICKS, Backend
from linnet.serve.request import Sampling


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield the names of the programs that JAX compiles in the block."""
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


def one_device_mesh() -> NamedSharding:
    """The placement of weights that were restored from a checkpoint."""
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())


@pytest.mark.parametrize("name", ["vq", "moe"])
def test_requests_compile_nothing_after_warm_up(name: str) -> None:
    model = MODELS[name]
    params, buffers = jax.device_put((model.params, model.buffers), one_device_mesh())
    backend = Backend(model.family, model.cfg, params, buffers, 3)
    backend.warm_up()
    with compilations() as compiled:
        _a_life(backend, from_file=False)
        _a_life(backend, from_file=True)
        empty_prompt = backend.make_state(backend.empty_memory(), backend.cfg.end_id, 0)
        backend.set_sampling(1, empty_prompt, Sampling(), (), frozenset())
        backend.first_token(1, empty_prompt)
    assert compiled == []


def _a_life(backend: Backend, *, from_file: bool) -> None:
    """Do everything that the engine may do with a request."""
    memory = backend.empty_memory()
    for n in (backend.chunk_len, backend.chunk_len, 5):
        memory = backend.prefill_chunk(memory, [7] * n)
    if from_file:
        memory = backend.to_device(jax.tree.map(np.asarray, memory))
        memory = backend.prefill_chunk(memory, [8] * 40)
    state = backend.make_state(memory, 9, 2 * backend.chunk_len + 5 + 40 * from_file)
    sampling = Sampling(temperature=0.5, top_k=5, repetition_penalty=1.2, logit_bias={5: 1.0}, seed=2**32 - 1)
    backend.set_sampling(1, state, sampling, (7, 8), frozenset({1}))
    backend.first_token(1, state)
    for n_ticks, with_top in ((N_TICKS, False), (N_TICKS, True), (1, False), (3, True)):
        backend.dispatch(n_ticks, [1], with_top=with_top, keep=[1])
    assert backend.mask_next(1, np.ones((backend.cfg.n_vocab,), bool))
    dispatch = backend.dispatch(1, [1], with_top=True, keep=[1])
    preempted = backend.save(1, state.n_read)
    backend.load(2, preempted)
    backend.set_sampling(2, preempted, sampling, (), frozenset())
    backend.memory_after(dispatch.before[1], [7, 8])
    jax.block_until_ready(backend.dispatch(N_TICKS, [2], with_top=False, keep=[]).tokens)


def test_state_from_a_file_compiles_nothing() -> None:
    with running_engine() as engine:
        engine.backend.warm_up()
        state = PendingRequest(engine, request("hello", return_state=True)).answer().end.state
        again = states.from_bytes(states.to_bytes(state), engine.backend.abstract_state, engine.fingerprint)
        warm = PendingRequest(engine, request(" more", state=state)).answer()
        with compilations() as compiled:
            reported = PendingRequest(engine, request(" more", state=again)).answer()
        assert reported.tokens == warm.tokens
        assert compiled == []


def test_no_ticks_are_dispatched_beyond_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as engine:
        real, requested = engine.backend.dispatch, []
        monkeypatch.setattr(
            engine.backend, "dispatch", lambda n, *rest, **kw: requested.append(n) or real(n, *rest, **kw)
        )
        for max_tokens in (1, 2, 1 + N_TICKS, 4 + N_TICKS):
            requested.clear()
            answer = PendingRequest(engine, request("x", max_tokens=max_tokens, ignore_eos=True)).answer()
            assert len(answer.tokens) == max_tokens == 1 + sum(requested)
            assert len(requested) == -(-(max_tokens - 1) // N_TICKS)
