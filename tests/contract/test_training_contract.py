"""What training promises, for every family: resumed is uninterrupted, cut is whole, evaluation counts each token once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import subjects
from run_comparison import assert_same_bits, lines

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.core.pytree import named_leaves, replace
from linnet.data import load_dataset
from linnet.data.sources.locations import with_base
from linnet.evaluate.language_model import evaluate
from linnet.models import registry
from linnet.models.base import Keys, ModelFamily, TokenFamily
from linnet.optim.optimizer import optimizer
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_state
from linnet.runs.metrics import read_metrics
from linnet.runs.state import TrainState, fresh_state, model_weights
from linnet.train.initial_state import open_task
from linnet.train.loop import train
from linnet.train.step import make_step, update
from linnet.train.task import Task

SLOW = [pytest.param(name, marks=pytest.mark.trial) for name in ("moe", "vq-moe")]
"""Where compiling takes longer than the test is worth every time."""
REST = ("moe", "vq-moe", "prior")
"""Left to `make test-slow` where the training step is the same code for every family."""


def parts(folder: Path, name: str, **changes: Any) -> tuple[RunConfig, ModelFamily, Any, TrainState, Task]:
    cfg = subjects.config(name, folder, **changes)
    family = registry.get(cfg.family)
    rule = optimizer(cfg.optim, family.param_specs(cfg.model))
    return cfg, family, rule, fresh_state(family, cfg, rule), open_task(cfg)


# Resuming


def test_resumed_equals_uninterrupted(subject: str, folder: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Every bit of the state (parameters, optimiser, moving average) and every figure of the metrics."""
    cfg = subjects.config(subject, folder)
    for stop in (7, 16):
        outcome = train(cfg, RunFolder(tmp_path), quiet=True, stop_at=stop)
        assert (outcome.step, outcome.finished) == (stop, False)
    assert train(cfg, RunFolder(tmp_path), quiet=True).finished
    got, want = open_state(tmp_path, "latest")[1], open_state(uninterrupted, "latest")[1]
    assert int(got.step) == 24
    assert want.ema is not None
    assert_same_bits(got, want)
    assert lines(tmp_path) == lines(uninterrupted)
    assert {r["step"] for r in lines(uninterrupted) if r["kind"] == "eval"} == {8, 16, 24}


def test_it_learns(uninterrupted: Path) -> None:
    losses = [r["loss"] for r in read_metrics(uninterrupted) if r["kind"] == "train"]
    assert losses[-1] < losses[0] - (0.3 if codec.load(uninterrupted / "config.json").reads_tokens else 0.1)


def test_restored_checkpoint_evaluates_to_the_logged_loss(uninterrupted: Path) -> None:
    cfg, state, _ = open_state(uninterrupted, "latest")
    result = open_task(cfg).evaluate(state, lambda batches, label, n: batches)
    reported = [r for r in read_metrics(uninterrupted) if r["kind"] == "eval"][-1]
    assert result.loss == reported["loss"]
    for name, value in result.metrics.items():
        assert reported[name] == value, name


def test_config_of_a_run_is_read_back_whole(subject: str, folder: Path, uninterrupted: Path) -> None:
    assert codec.load(uninterrupted / "config.json") == with_base(subjects.config(subject, folder))


# One update


@pytest.mark.parametrize("subject", ["vq", "toy", *[pytest.param(name, marks=pytest.mark.slow) for name in REST]])
def test_seed_settles_every_bit(subject: str, folder: Path) -> None:
    cfg, fam, rule, _, _ = parts(folder, subject)
    step = make_step(fam, cfg, rule)

    def run(seed: int) -> tuple[TrainState, list[float]]:
        _, _, _, state, data = parts(folder, subject, seed=seed)
        losses: list[float] = []
        for i in range(4):
            state, metrics = step(state, data.batch(i))
            losses.append(float(metrics["loss"]))
        return state, losses

    (first, losses), (again, repeated), (_, other) = run(0), run(0), run(1)
    assert losses == repeated
    assert_same_bits(first, again)
    assert all(a != b for a, b in zip(losses, other, strict=True))


@pytest.mark.parametrize("subject", ["toy", "prior", pytest.param("vq", marks=pytest.mark.slow), *SLOW])
def test_accumulation_changes_nothing(subject: str, folder: Path) -> None:
    """Dropout included: a row draws by its place in the whole batch. What may differ is switched off: candidates for dead codes,
    and the balance loss, which is a product of two means and so each micro-batch's own (a test of moe says which)."""
    model = subjects.config(subject, folder).model
    off: dict[str, Any] = {} if model.routing is None else {"model.balance_weight": 0.0}
    off |= {"model.restart_dead_codes": False} if hasattr(model, "restart_dead_codes") else {}
    results: list[Any] = []
    for n in (1, 4):  # each compiles an update of its own
        cfg, fam, rule, state, data = parts(folder, subject, **{"train.accumulate": n, **off})
        after, metrics = jax.jit(functools.partial(update, fam, cfg, rule))(state, data.batch(0))
        results.append((after.params, after.buffers, after.carry, metrics["loss"], metrics["grad_norm"]))
    for other in results[1:]:
        for (name, a), (_, b) in zip(named_leaves(results[0]), named_leaves(other), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5, err_msg=name)


def test_moving_average_is_what_it_says_and_what_is_evaluated(subject: str, folder: Path) -> None:
    cfg, fam, rule, state, data = parts(folder, subject)
    step = make_step(fam, cfg, rule)
    average = jax.tree.map(np.array, state.params)
    for i in range(6):  # past the warm-up, whose first update moves nothing but by decay
        state, _ = step(state, data.batch(i))
        average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * np.asarray(new), average, state.params)
    for (name, got), (_, want) in zip(named_leaves(state.ema), named_leaves(average), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_same_bits(model_weights(state)[0], state.ema)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state.ema, state.params)), strict=True))


def test_nonfinite_update_changes_no_state(subject: str, folder: Path) -> None:
    cfg, fam, rule, state, data = parts(folder, subject)
    step = make_step(fam, cfg, rule)
    state, _ = step(state, data.batch(0))
    weights, tree = jax.tree.flatten(state.params)
    poisoned = replace(state, params=jax.tree.unflatten(tree, [weights[0] * jnp.nan, *weights[1:]]))
    kept = jax.tree.map(np.array, poisoned)
    after, metrics = step(poisoned, data.batch(1))
    assert int(metrics["bad_run"]) == int(after.skipped) == 1
    assert int(after.step) == 2
    for part in ("params", "buffers", "opt_state", "ema"):
        assert_same_bits(getattr(after, part), getattr(kept, part))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(after.carry))


@pytest.mark.trial
def test_every_optimizer_learns(subject: str, folder: Path) -> None:
    """A few updates by each rule, on one batch: the loss falls, and no parameter that has a gradient is left behind."""
    cfg, fam, _, state, data = parts(folder, subject)
    batch, carry = data.batch(0), fam.empty_carry(cfg.model, cfg.data.batch_size)
    keys = Keys(update=rng.root(0), sequence=rng.root(1))  # the same for every update, so that losses can be compared

    @jax.jit
    def evaluated(params: Any) -> Any:
        return jax.value_and_grad(lambda p: fam.loss(p, state.buffers, carry, batch, keys, 0, cfg.model)[0])(params)

    start, gradient = evaluated(state.params)
    for name, lr in (("adamw", 3e-3), ("lion", 1e-3), ("adafactor", 0.03), ("muon", 0.01)):
        changed = subjects.config(subject, folder, **{"optim.name": name, "optim.lr": lr, "optim.warmup_steps": 0})
        rule = optimizer(changed.optim, fam.param_specs(cfg.model))
        params, kept, now = state.params, jax.jit(rule.init)(state.params), gradient
        step = jax.jit(rule.update)
        loss = start
        for _ in range(4):
            updates, kept = step(now, kept, params)
            params = optax.apply_updates(params, updates)
            loss, now = evaluated(params)
        assert float(loss) < float(start) - 0.01, name
        for (leaf, old), (_, new), (_, slope) in zip(*map(named_leaves, (state.params, params, gradient)), strict=True):
            if np.any(np.asarray(slope) != 0):
                assert not np.array_equal(old, new), f"{name} leaves {leaf}"


# Evaluation


def test_evaluation_counts_every_token_once_for_any_segmentation(subject: str, folder: Path) -> None:
    """The last window of a split is partly empty, and the last batch as well."""
    cfg = subjects.config(subject, folder)
    if not cfg.reads_tokens:
        pytest.skip("it reads no tokens")
    cfg, fam, _, state, _ = parts(folder, subject, **{"data.validation_fraction": 0.06})
    assert isinstance(fam, TokenFamily)
    data = load_dataset(cfg.tokens, cfg.seed)
    assert data.validation.n_tokens % cfg.tokens.sequence_len
    size = next(n for n in (3, 5, 7) if data.validation.n_windows % n)
    separate, together = (
        evaluate(fam, cfg, state.params, state.buffers, data, "validation", batch_size=n) for n in (1, size)
    )
    assert separate.tokens == together.tokens == data.validation.n_tokens
    assert separate.bytes == together.bytes == data.validation.n_bytes
    assert separate.nats == pytest.approx(together.nats, rel=1e-6)
