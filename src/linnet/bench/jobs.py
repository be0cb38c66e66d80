"""Benchmarks of the actual training step, evaluation, prefill and decode of a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from linnet.bench.measure import Benchmark
from linnet.bench.run import TICKS
from linnet.config.schema import RunConfig
from linnet.core import params as weights_of
from linnet.core import quant, rng
from linnet.core.dtypes import WeightDtype
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import leaf_name, n_bytes
from linnet.data import load_dataset
from linnet.evaluate.language_model import evaluate, make_nats
from linnet.models import registry
from linnet.models.base import TokenFamily
from linnet.models.decoder import Decoder
from linnet.nn import sampling
from linnet.optim.optimizer import optimizer as make_optimizer
from linnet.runs.state import fresh_buffers, fresh_state
from linnet.train.step import compile_step

BACKWARD = 3
"""Ratio of the FLOPs of a training step to those of its forward pass."""


def train(cfg: RunConfig) -> Benchmark:
    family = registry.tokens(cfg.family)
    return train_benchmark(cfg, family, family.flops_per_token(cfg.model))


def evaluation(cfg: RunConfig) -> Benchmark:
    family = registry.tokens(cfg.family)
    return eval_benchmark(cfg, family, family.flops_per_token(family.reading_config(cfg.model)))


def train_benchmark(cfg: RunConfig, family: TokenFamily, flops: float) -> Benchmark:
    """Consecutive updates on the corpus. As in the trainer, the next batch is made while the device computes."""
    data = load_dataset(cfg.tokens, cfg.seed)
    optimizer = make_optimizer(cfg.optim, family.param_specs(cfg.model))
    state = fresh_state(family, cfg, optimizer)
    batch, step = jax.device_put(data.batch(0)), 0
    update: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal update
        update = compile_step(family, cfg, optimizer, state, batch)
        return update

    def run() -> None:
        nonlocal state, batch, step
        assert update is not None
        state, metrics = update(state, batch)
        step += 1
        batch = jax.device_put(data.batch(step))
        jax.block_until_ready((state, metrics))

    tokens = cfg.data.batch_size * cfg.tokens.update_len
    return Benchmark(tokens=tokens, flops_per_token=BACKWARD * flops, compile=compile_, run=run)


def eval_benchmark(cfg: RunConfig, family: TokenFamily, flops: float) -> Benchmark:
    """One batch of complete sequences with `evaluate` itself, including reading and summing up."""
    data = load_dataset(cfg.tokens, cfg.seed)
    params, buffers = fresh_weights(cfg)
    size = cfg.data.batch_size
    nats: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal nats
        carry, batch = family.empty_carry(cfg.model, size), next(iter(data.evaluation("train", size, size)))
        nats = make_nats(family, cfg).lower(params, buffers, carry, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
        return nats

    def run() -> None:
        evaluate(family, cfg, params, buffers, data, "train", nats=nats, batch_size=size, limit=size)

    return Benchmark(tokens=size * cfg.tokens.sequence_len, flops_per_token=flops, compile=compile_, run=run)


def prefill(cfg: RunConfig, weights: WeightDtype = "float32") -> Benchmark:
    """Consecutive prompts, each from prefill to the first generated token. Compile time includes all programs involved."""
    params, buffers = fresh_weights(cfg, weights)
    prompts, slots, model = _prompts(cfg), _decoder(cfg), cfg.lm
    params = slots.cast_weights(params)
    prepared = slots.prepare(params, buffers, model)

    def answer(prompt: list[int]) -> None:
        one = slots.insert(slots.init_slots(model, 1), slots.prefill(params, buffers, prompt[:-1], model), 0)
        drawn = slots.decode(prepared, one, *_draws(cfg, [prompt]), cfg=model, n_ticks=1)[2]
        drawn.block_until_ready()

    def run() -> None:
        for prompt in prompts:
            answer(prompt)

    return Benchmark(
        tokens=len(prompts) * cfg.tokens.sequence_len,
        flops_per_token=registry.get(cfg.family).flops_per_token(model),
        compile=lambda: answer(prompts[0][:2]),
        run=run,
        extra=lambda seconds: {"time_to_first_token": seconds / len(prompts)},
    )


def decode(cfg: RunConfig, weights: WeightDtype = "float32") -> Benchmark:
    """All slots generate `TICKS` tokens per run after a prompt. If the model's context is bounded, each run restarts from the same
    state, because the context would fill up."""
    params, buffers = fresh_weights(cfg, weights)
    prompts, slots, model = _prompts(cfg), _decoder(cfg), cfg.lm
    params = slots.cast_weights(params)
    prepared = slots.prepare(params, buffers, model)
    state = slots.init_slots(model, len(prompts))
    for i, prompt in enumerate(prompts):
        state = slots.insert(state, slots.prefill(params, buffers, prompt[:-1], model), i)
    size = n_bytes(state) // len(prompts)
    tokens, settings, keys, seen = _draws(cfg, prompts)
    kept = None if model.context is None else jax.tree.map(jnp.copy, (state, tokens, seen))
    ticks: Callable[..., Any] | None = None

    def compile_() -> Any:
        nonlocal ticks
        arguments = (prepared, state, tokens, settings, keys, seen)
        program: Any = slots.decode  # jitted
        ticks = program.lower(*arguments, cfg=model, n_ticks=TICKS).compile()
        return ticks

    def run() -> None:
        nonlocal state, tokens, seen
        assert ticks is not None
        if kept is not None:  # copied, because the program donates its arguments
            state, tokens, seen = jax.tree.map(jnp.copy, kept)
        state, seen, drawn, _, _ = ticks(prepared, state, tokens, settings, keys, seen)
        tokens = drawn[-1].block_until_ready()

    return Benchmark(
        tokens=TICKS * len(prompts),
        flops_per_token=registry.get(cfg.family).flops_per_token(model.for_single_tokens()),
        compile=compile_,
        run=run,
        extra=lambda _: {"context": cfg.tokens.sequence_len, "state_bytes": size},
    )


def _decoder(cfg: RunConfig) -> Decoder:
    return registry.tokens(cfg.family).decoder


def fresh_weights(cfg: RunConfig, weights: WeightDtype = "float32") -> tuple[Any, Any]:
    """Initialize the weights leaf by leaf and cast each at once, so that initialization does not raise the peak memory."""
    family, key = registry.get(cfg.family), rng.fold_in_name(rng.root(cfg.seed), "params")

    def made(path: tuple[Any, ...], spec: Spec) -> Any:
        return _draw(rng.fold_in_name(key, leaf_name(path)), spec=spec, weights=weights)

    params = jax.tree_util.tree_map_with_path(made, family.param_specs(cfg.model), is_leaf=is_spec)
    return params, jax.jit(lambda: fresh_buffers(family, cfg))()


@partial(jax.jit, static_argnames=("spec", "weights"))
def _draw(key: PRNGKeyArray, *, spec: Spec, weights: WeightDtype) -> Any:
    return quant.cast_params(weights_of.init(spec, key), spec, weights)


def _prompts(cfg: RunConfig) -> list[list[int]]:
    return load_dataset(cfg.tokens, cfg.seed).batch(0).inputs.tolist()


def _draws(cfg: RunConfig, prompts: list[list[int]]) -> tuple[Array, sampling.SamplingSettings, Array, Array]:
    """Return the other arguments of `decode`: last tokens, sampling settings, random keys, and counts of seen tokens."""
    n = len(prompts)
    seen = jnp.zeros((n, cfg.lm.n_vocab), jnp.int32)
    last = jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32)
    return last, sampling.sampling_settings(n), jax.random.split(rng.root(cfg.seed), n), seen


JOBS: dict[str, Callable[[RunConfig], Benchmark]] = {
    "train": train,
    "eval": evaluation,
    "prefill": prefill,
    "decode": decode,
    "prefill-int8": partial(prefill, weights="int8"),
    "decode-int8": partial(decode, weights="int8"),
}
