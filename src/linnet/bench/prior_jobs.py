"""Benchmarks of the diffusion prior: the trainer's update, and sampling. The rates are in samples, not tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from linnet.bench.jobs import BACKWARD, fresh_weights
from linnet.bench.measure import Benchmark
from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.data.embeddings import PairBatch
from linnet.models import registry
from linnet.models.prior import sampling
from linnet.models.prior.network import flops_of
from linnet.models.prior.solver import Solver, make_solver
from linnet.nn.norm import l2_normalize
from linnet.optim.optimizer import optimizer as make_optimizer
from linnet.runs.state import fresh_state
from linnet.train.step import compile_step

PREFIX = "prior-"


def prior_job(name: str, cfg: RunConfig) -> Benchmark:
    """Make the benchmark named `prior-train`, or `prior-SOLVER-STEPS` such as `prior-ddim-64`."""
    what, _, steps = name.removeprefix(PREFIX).partition("-")
    return _sample(cfg, cast(Solver, what), int(steps)) if steps else _train(cfg)


def _train(cfg: RunConfig) -> Benchmark:
    """Consecutive updates, each on a batch transferred from the host, as in the trainer."""
    family, model = registry.get(cfg.family), cfg.prior
    optimizer = make_optimizer(cfg.optim, family.param_specs(model))
    state, batch = fresh_state(family, cfg, optimizer), jax.device_get(pairs(cfg))
    update: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal update
        update = compile_step(family, cfg, optimizer, state, jax.device_put(batch))
        return update

    def run() -> None:
        nonlocal state
        assert update is not None
        state, metrics = update(state, jax.device_put(batch))
        jax.block_until_ready((state, metrics))

    n_text = model.max_text_len + model.n_text_token
    flops = BACKWARD * flops_of(model, n_text + model.n_new_token, n_past=0, n_last=1)
    return Benchmark(tokens=cfg.data.batch_size, flops_per_token=flops, compile=compile_, run=run)


def _sample(cfg: RunConfig, solver: Solver, steps: int) -> Benchmark:
    """Sampling from text to image embeddings: prefill of all texts, then all solver steps. As in serving, weights are prepared
    before."""
    model, batch = cfg.prior, pairs(cfg)
    params = sampling.prepare(fresh_weights(cfg)[0], model)
    table = make_solver(model, steps, solver)
    n = cfg.data.batch_size
    rows, keys = sampling.stack_solvers([table] * n, [1.0] * n), jax.random.split(rng.root(cfg.seed), n)
    given = (params, batch.text_embed, batch.encodings, rows, keys)
    program: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal program
        program = sampling.run.lower(*given, cfg=model, guided=False, n_step=len(table)).compile()
        return program

    def run() -> None:
        assert program is not None
        jax.block_until_ready(program(*given))

    n_text = model.max_text_len + model.n_text_token
    read = flops_of(model, n_text, n_past=0, n_last=0)
    flops = read + len(table) * flops_of(model, model.n_new_token, n_past=n_text, n_last=1)
    return Benchmark(tokens=n, flops_per_token=flops, compile=compile_, run=run, extra=lambda _: {"steps": len(table)})


def pairs(cfg: RunConfig) -> PairBatch:
    """Return a batch of random unit vectors; their values do not affect the timing."""
    model, n = cfg.prior, cfg.data.batch_size

    def directions(name: str, *shape: int) -> Any:
        return l2_normalize(jax.random.normal(rng.fold_in_name(rng.root(cfg.seed), name), (n, *shape)))

    return PairBatch(
        text_embed=directions("text", model.d_text),
        image_embed=directions("image", model.dim),
        encodings=directions("encodings", model.max_text_len, model.d_text) if model.text_encodings else None,
        mask=jnp.ones((n,), jnp.float32),
    )
