"""The prior's engine: each row bit for bit as if alone, and the life of a request from queue to end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from prior_requests import RequestEvents, running, wanted
from tiny_prior import config, model, prepared

from linnet.core import rng
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.releases import behaviour
from linnet.models.prior.sampling import run, sample, stack_solvers
from linnet.models.prior.solver import SolverTable, make_solver
from linnet.serve.prior.engine import PriorEngine, make_solver_table
from linnet.serve.prior.request import SampleRequest
from linnet.serve.request import Draining, QueueFull

CFG = config(dim=64, n_head=4, d_head=32, ff_mult=4, timesteps=12)
"""One for all, and two slots: what is compiled serves every test."""
HOW: list[dict[str, Any]] = [
    {"solver": "ddpm"},
    {"steps": 5, "solver": "ddim", "guidance": 2.5, "seed": 3},
    {"steps": 7, "solver": "dpm", "seed": 1},
    {"steps": 9, "solver": "ddim", "eta": 0.3, "guidance": 0.5, "seed": 9},
    {"steps": 4, "solver": "dpm", "seed": 2**32 - 1, "guidance": 3.0},
    {"steps": 12, "solver": "ddim", "seed": 5},
]


def plan_of(cfg: PriorConfig, ask: SampleRequest) -> SolverTable:
    return make_solver(cfg, ask.steps, ask.solver, ask.eta)


def key(ask: SampleRequest) -> Any:
    return rng.sample_key(jnp.uint32(ask.seed))


def by_run(cfg: PriorConfig, asks: list[SampleRequest]) -> np.ndarray:
    """All rows by the family's own scan."""
    how = stack_solvers([plan_of(cfg, ask) for ask in asks], [ask.guidance for ask in asks])
    text = jnp.asarray(np.stack([ask.text for ask in asks]))
    encodings = jnp.asarray(np.stack([ask.encodings for ask in asks if ask.encodings is not None]))
    keys = jnp.stack([key(ask) for ask in asks])
    found, _ = run(prepared(cfg), text, encodings, how, keys, cfg=cfg, guided=True, n_step=cfg.timesteps)
    return np.asarray(found)


def by_sample(cfg: PriorConfig, ask: SampleRequest) -> np.ndarray:
    encodings = None if ask.encodings is None else jnp.asarray(ask.encodings)[None]
    text, keys = jnp.asarray(ask.text)[None], key(ask)[None]
    found = sample(prepared(cfg), text, encodings, plan_of(cfg, ask), keys, cfg, guidance=ask.guidance)
    return np.asarray(found[0])


def alone_and_among(cfg: PriorConfig, asks: list[SampleRequest]) -> list[np.ndarray]:
    with running(cfg) as engine:
        alone = [RequestEvents(engine, ask).embedding() for ask in asks]
        together = [RequestEvents(engine, ask) for ask in reversed(asks)]  # more than there are slots: they come and go
        found = [heard.embedding() for heard in together][::-1]
    for one, among in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one, among)
    assert len({one.tobytes() for one in alone}) == len(asks)
    return alone


@pytest.mark.optimized
def test_row_is_batch_invariant_and_equals_the_familys_scan() -> None:
    asks = [wanted(CFG, i, **how) for i, how in enumerate(HOW)]
    np.testing.assert_array_equal(np.stack(alone_and_among(CFG, asks)), by_run(CFG, asks))


@pytest.mark.optimized
@pytest.mark.trial
@pytest.mark.parametrize(
    "options",
    [
        {"text_encodings": False, "max_text_len": 0},
        {"self_cond": True, "normalize_start": True},
        {"dtype": "bfloat16", "normalize_final": True, "normalize_steps": True},
        {"continuous_time": True, "n_image_token": 2},
        {"objective": "v"},
        {"objective": "noise", "clip_start": True},
    ],
    ids=["embedding", "self_cond", "bfloat16", "continuous", "v", "noise"],
)
def test_row_equals_sample_for_any_model(options: dict[str, Any]) -> None:
    cfg = dataclasses.replace(CFG, **options)
    asks = [wanted(cfg, i, **how) for i, how in enumerate(HOW)]
    for ask, found in zip(asks, alone_and_among(cfg, asks), strict=True):
        np.testing.assert_array_equal(found, by_sample(cfg, ask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "release",
    [
        "0.15.4",
        pytest.param("0.16.19", marks=pytest.mark.trial),
        pytest.param("1.1.0", marks=pytest.mark.trial),
        pytest.param("1.8.4", marks=pytest.mark.trial),
        "1.10.3",
        pytest.param("1.12.0", marks=pytest.mark.trial),
    ],
)
def test_every_release_is_served_as_it_is_sampled(release: str) -> None:
    """Texts of any number of encodings, guided or not. Where texts are masked a slot has more room than they need."""
    cfg = config(timesteps=6, self_cond=release >= "1.8", **behaviour(release))
    asks = [wanted(cfg, i, steps=4, solver="ddim", guidance=2.5, seed=i) for i in range(2)]
    asks[1] = dataclasses.replace(asks[1], encodings=asks[1].encodings[:2])  # pyright: ignore[reportOptionalSubscript]
    with running(cfg) as engine:
        heard = [RequestEvents(engine, ask) for ask in asks]
        found = [one.embedding() for one in heard]
    for ask, one in zip(asks, found, strict=True):
        np.testing.assert_allclose(one, by_sample(cfg, ask), atol=2e-5 * np.abs(one).max())


class Gate:
    """Lets an engine make its steps one by one."""

    def __init__(self, engine: PriorEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free, self._real, self.n_ticks = threading.Semaphore(0), engine.backend.tick, 0
        monkeypatch.setattr(engine.backend, "tick", self._tick)

    def _tick(self, **how: Any) -> Any:
        self._free.acquire(timeout=60)
        self.n_ticks += 1
        return self._real(**how)

    def let(self, n: int) -> None:
        self._free.release(n)


@pytest.fixture
def engine() -> Iterator[PriorEngine]:
    with running(CFG) as engine:
        yield engine


def test_progress_is_reported_at_even_intervals_and_ends_with_the_result(engine: PriorEngine) -> None:
    ask = wanted(CFG, 0, solver="ddpm", n_progress=3)
    engine.backend.load(
        1, engine.backend.make_state(ask, plan_of(CFG, ask))
    )  # by hand, while the engine has nothing to do
    by_hand = [np.asarray(engine.backend.tick(guided=False, with_embeddings=True).starts)[1] for _ in range(9)]
    plain, heard = RequestEvents(engine, wanted(CFG, 1, solver="ddpm", seed=4)), RequestEvents(engine, ask)
    heard.end()
    assert [(event.step, event.n_steps) for event in heard.reported] == [(3, 12), (6, 12), (9, 12)]
    for event in heard.reported:
        np.testing.assert_array_equal(event.start, by_hand[event.step - 1])
    plain.end()
    assert plain.reported == []


def test_cancelled_request_leaves_its_slot_at_the_next_tick(
    engine: PriorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = wanted(CFG, 1, steps=3, solver="dpm")
    alone, n_steps = RequestEvents(engine, ask).embedding(), len(plan_of(CFG, ask))
    gate = Gate(engine, monkeypatch)
    gone, other = (RequestEvents(engine, wanted(CFG, i, id=f"slow{i}", solver="ddpm")) for i in (0, 2))
    next_one = RequestEvents(engine, ask)
    gate.let(3)
    engine.cancel("slow0")
    gate.let(1 + n_steps + 1)  # at most one was planned before, and the last is read back when the next has begun
    assert gone.end().reason == "cancelled"
    np.testing.assert_array_equal(next_one.embedding(), alone)
    assert gate.n_ticks <= 3 + 1 + n_steps + 1
    gate.let(100)
    assert other.end().reason == "stop"
    assert engine.stats()["running"] == 0


def test_preempted_request_continues_bit_identically(engine: PriorEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [wanted(CFG, i, solver="ddpm", seed=2) for i in (0, 2)]
    alone = [RequestEvents(engine, ask).embedding() for ask in asks]
    gate = Gate(engine, monkeypatch)
    slow = [RequestEvents(engine, ask) for ask in asks]
    gate.let(5)
    while gate.n_ticks < 5:
        pass
    urgent = [RequestEvents(engine, wanted(CFG, i, id=f"urgent{i}", steps=3, priority=5)) for i in (1, 3)]
    gate.let(7)
    assert [one.end().reason for one in urgent] == ["stop", "stop"]  # before the slow ones, which need 24
    gate.let(100)
    for heard, embedding in zip(slow, alone, strict=True):
        np.testing.assert_array_equal(heard.embedding(), embedding)


def test_deadlines_full_queue_and_drain_end_requests_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    with running(CFG, max_waiting=1, clock=lambda: now[0]) as engine:
        gate = Gate(engine, monkeypatch)
        late = []
        for i in (0, 1):
            late.append(RequestEvents(engine, wanted(CFG, i, solver="ddpm", deadline=5.0)))
            gate.let(1)
            while engine.stats()["running"] <= i:
                pass
        gate.let(1)
        waiting: list[RequestEvents] = []
        with pytest.raises(
            QueueFull
        ):  # one waits, and a few may stand ready before the slots, should the engine look in between
            waiting.extend(RequestEvents(engine, wanted(CFG, i, steps=4, deadline=50.0)) for i in range(2, 12))
        assert waiting
        now[0] = 6.0
        gate.let(1000)
        assert [one.end().reason for one in late] == ["deadline", "deadline"]
        assert engine.stop(within=30.0)
        assert {one.end().reason for one in waiting} == {"stop"}
        with pytest.raises(Draining):
            engine.submit(wanted(CFG, 5), lambda event: None)


def test_failure_ends_running_requests_and_the_next_is_served(
    engine: PriorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = wanted(CFG, 1, steps=6)
    alone = RequestEvents(engine, ask).embedding()
    real, left = engine.backend.tick, threading.Semaphore(2)

    def fails(**how: Any) -> Any:
        if not left.acquire(blocking=False):
            raise RuntimeError("the device is gone")
        return real(**how)

    monkeypatch.setattr(engine.backend, "tick", fails)
    end = RequestEvents(engine, wanted(CFG, 0, steps=6)).end()
    assert (end.reason, end.embedding, end.error) == ("error", None, "the device is gone")
    monkeypatch.setattr(engine.backend, "tick", real)
    np.testing.assert_array_equal(RequestEvents(engine, ask).embedding(), alone)


def test_unsupported_requests_are_rejected_before_queueing() -> None:
    cfg = config(p_drop_text=0.0, timesteps=12)
    good = wanted(cfg, 0)
    assert len(make_solver_table(good, cfg)) == len(make_solver(cfg, 12, "dpm"))
    long = config(timesteps=1000)
    usual = [len(make_solver_table(wanted(long, 0, solver=solver), long)) for solver in ("dpm", "ddim", "ddpm")]
    assert usual == [16, len(make_solver(long, 64, "ddim")), 1000]
    for change in (
        {"guidance": 2.0},
        {"steps": 1},
        {"steps": 13},
        {"steps": 5, "solver": "ddpm"},
        {"eta": 2.0, "solver": "ddim"},
        {"text": good.text[:5]},
        {"encodings": np.zeros((6, cfg.d_text), np.float32)},
        {"encodings": np.zeros((2, 3), np.float32)},
        {"encodings": None},
    ):
        ask = wanted(cfg, 0, **change)
        with pytest.raises(UserError):
            make_solver_table(ask, cfg)
    for change in ({"guidance": float("nan")}, {"seed": -1}, {"text": np.full_like(good.text, np.inf)}):
        with pytest.raises(UserError):
            wanted(cfg, 0, **change)
    with pytest.raises(UserError, match="without"):
        make_solver_table(good, config(text_encodings=False, max_text_len=0))
    roomless = config(**behaviour("0.15.4"), max_text_len=0)
    with pytest.raises(UserError, match="max_text_len"):
        PriorEngine(roomless, model(roomless))


def test_guidance_without_effect_is_none_and_reported(engine: PriorEngine) -> None:
    assert RequestEvents(engine, wanted(CFG, 0, steps=2, guidance=3.0)).end().guidance == 3.0
    padded = dataclasses.replace(CFG, depth=1, **behaviour("1.8.4"))
    with running(padded) as old:
        guided, plain = (RequestEvents(old, wanted(padded, 0, steps=2, guidance=scale)).end() for scale in (3.0, 1.0))
    assert (guided.guidance, guided.reason) == (1.0, "stop")
    np.testing.assert_array_equal(guided.embedding, plain.embedding)


def test_engine_rejects_unsupported_requests_and_continues(engine: PriorEngine) -> None:
    with pytest.raises(UserError, match="steps"):
        engine.submit(wanted(CFG, 0, steps=99), lambda event: None)
    assert RequestEvents(engine, wanted(CFG, 0, steps=2)).end().reason == "stop"
