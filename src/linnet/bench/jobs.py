"""The jobs: the real training step, evaluation, prefill and decode of a config, made ready to be compiled and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.bench import dense_model
from linnet.bench.measure import Job
from linnet.config import RunConfig
from linnet.data import open_data
from linnet.families import registry
from linnet.families.family import Family
from linnet.train.evaluate import evaluate, make_nats
from linnet.train.optim import optimizer as make_optimizer
from linnet.train.state import fresh_state, model_weights
from linnet.train.step import make_step

BACKWARD = 3
"""Flops of a training step over those of its forward pass."""


def train(cfg: RunConfig) -> Job:
    family = registry.get(cfg.family)
    return _train(cfg, family, family.flops_per_token(cfg.model))


def train_dense(cfg: RunConfig) -> Job:
    return _train(cfg, dense_model.dense_family(), dense_model.flops_per_token(cfg.model, cfg.data.sequence_len))


def evaluation(cfg: RunConfig) -> Job:
    family = registry.get(cfg.family)
    return _evaluation(cfg, family, family.flops_per_token(cfg.model))


def evaluation_dense(cfg: RunConfig) -> Job:
    return _evaluation(cfg, dense_model.dense_family(), dense_model.flops_per_token(cfg.model, cfg.data.sequence_len))


def _train(cfg: RunConfig, family: Family, flops: float) -> Job:
    """Updates one after another on the corpus; the next batch is made while the device works, as the trainer does."""
    data = open_data(cfg.data, cfg.seed)
    optimizer = make_optimizer(cfg.optim, family.param_specs(cfg.model))
    state = fresh_state(family, cfg, optimizer)
    batch, step = jax.device_put(data.batch(0)), 0
    update: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal update
        update = make_step(family, cfg, optimizer).lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
        return update

    def run() -> None:
        nonlocal state, batch, step
        assert update is not None
        state, metrics = update(state, batch)
        step += 1
        batch = jax.device_put(data.batch(step))
        jax.block_until_ready((state, metrics))

    tokens = cfg.data.batch_size * cfg.data.update_len
    return Job(tokens=tokens, flops_per_token=BACKWARD * flops, compile=compile_, run=run)


def _evaluation(cfg: RunConfig, family: Family, flops: float) -> Job:
    """One batch of whole sequences by `evaluate` itself, reading and adding up included."""
    data = open_data(cfg.data, cfg.seed)
    params, buffers = model_weights(fresh_state(family, cfg, make_optimizer(cfg.optim, family.param_specs(cfg.model))))
    size = cfg.data.batch_size
    nats: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal nats
        carry, batch = family.empty_carry(cfg.model, size), next(iter(data.evaluation("train", size, size)))
        nats = make_nats(family, cfg).lower(params, buffers, carry, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
        return nats

    def run() -> None:
        evaluate(family, cfg, params, buffers, data, "train", nats=nats, batch_size=size, limit=size)

    return Job(tokens=size * cfg.data.sequence_len, flops_per_token=flops, compile=compile_, run=run)


JOBS: dict[str, Callable[[RunConfig], Job]] = {
    "train": train,
    "train-dense": train_dense,
    "eval": evaluation,
    "eval-dense": evaluation_dense,
}
