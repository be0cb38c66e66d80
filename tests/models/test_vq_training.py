"""What is special in training `vq`: the two lifetimes of dropout, codebook care, masks, bfloat16 over float32 parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from linnet.core import params as weights
from linnet.core import rng
from linnet.core.pytree import replace
from linnet.data import Batch
from linnet.models.base import Keys
from linnet.models.vq import family
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import VQBuffers
from linnet.nn import codebook
from linnet.nn.remat import Remat
from linnet.runs.folder import RunFolder
from linnet.runs.metrics import read_metrics
from linnet.train.loop import train

PLAIN = dataclasses.replace(
    tiny.MODEL, p_dropemb=0.0, p_dropsin=0.0, p_dropres=0.0, p_droplyr=0.0, restart_dead_codes=False
)


def model(cfg: VQConfig) -> tuple[Any, Any]:
    key = rng.root(0)
    return weights.init(family.param_specs(cfg), key), weights.init(family.buffer_specs(cfg), key)


def batch(masked: int = 0) -> Batch:
    tokens = np.random.default_rng(0).integers(3, 259, (2, 17)).astype(np.int32)
    mask = np.ones((2, 16), np.float32)
    mask[:, 16 - masked :] = 0
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "doc_ids": np.zeros((2, 16), np.int32),
        "loss_mask": mask,
    }
    return Batch(**{name: jnp.asarray(value) for name, value in arrays.items()})


def loss_of(cfg: VQConfig, keys: Keys | None, data: Batch | None = None) -> float:
    params, buffers = model(cfg)
    data = data or batch()
    value, _ = family.loss(params, buffers, family.FAMILY.empty_carry(cfg, 2), data, keys, 0, cfg)
    return float(value)


def keys(update: int, sequence: int) -> Keys:
    return Keys(update=rng.fold_in(rng.root(1), update), sequence=rng.fold_in(rng.root(2), sequence))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p_dropemb", "p_dropres"])
def test_dropout_is_sampled_per_update(name: str) -> None:
    cfg = dataclasses.replace(PLAIN, **{name: 0.5})
    assert loss_of(cfg, keys(0, 0)) != loss_of(cfg, keys(1, 0))
    assert loss_of(cfg, keys(0, 0)) == loss_of(cfg, keys(0, 1))
    assert loss_of(cfg, None) == loss_of(PLAIN, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p_dropsin", "p_droplyr"])
def test_dropout_is_constant_for_a_sequence(name: str) -> None:
    cfg = dataclasses.replace(PLAIN, **{name: 0.5})
    assert loss_of(cfg, keys(0, 0)) == loss_of(cfg, keys(1, 0))
    assert len({loss_of(cfg, keys(0, sequence)) for sequence in range(4)}) > 1
    assert loss_of(cfg, None) == loss_of(PLAIN, None)


def test_masked_tokens_do_not_train() -> None:
    params, buffers = model(PLAIN)

    def seen(data: Batch) -> Any:
        _, aux = family.loss(params, buffers, family.FAMILY.empty_carry(PLAIN, 2), data, None, 0, PLAIN)
        return aux.statistics.seen

    some = seen(batch(masked=5))
    assert float(some.count.sum()) == PLAIN.n_unit * PLAIN.n_head * 2 * 11
    plain = batch(masked=5)
    inputs, targets = jnp.asarray(plain.inputs), jnp.asarray(plain.targets)
    changed = replace(plain, targets=targets.at[:, -5:].set(7), inputs=inputs.at[:, -4:].set(9))
    assert np.array_equal(some.total, seen(changed).total)
    assert loss_of(PLAIN, None, changed) == pytest.approx(loss_of(PLAIN, None, batch(masked=5)))


def test_codes_learn_by_moving_average() -> None:
    _, buffers = model(PLAIN)
    ones = jax.tree.map(jnp.ones_like, buffers)
    statistics = family.Statistics(
        seen=codebook.CodeStatistics(count=ones.code_count * 3, total=ones.code_total * 5), candidates=None
    )
    after = family.update_buffers(ones, statistics, PLAIN)
    np.testing.assert_allclose(after.code_count, 0.99 + 0.01 * 3, rtol=1e-6)
    np.testing.assert_allclose(after.code_total, 0.99 + 0.01 * 5, rtol=1e-6)


def test_dead_codes_move_onto_current_keys_and_live_ones_stay() -> None:
    cfg = dataclasses.replace(PLAIN, restart_dead_codes=True, dead_code_below=0.5)
    params, buffers = model(cfg)
    dead = VQBuffers(code_count=buffers.code_count.at[:, :, 2].set(0.0), code_total=buffers.code_total)
    data = jax.tree.map(jnp.asarray, batch(masked=5))
    _, aux = family.loss(params, dead, family.FAMILY.empty_carry(cfg, 2), data, keys(0, 0), 0, cfg)
    after = family.update_buffers(dead, aux.statistics, cfg)
    without = family.update_buffers(dead, aux.statistics, dataclasses.replace(cfg, dead_code_below=0.0))
    counts = np.asarray(without.code_count)
    restarted = counts < 0.5
    assert restarted[:, :, 2].all()
    np.testing.assert_array_equal(np.asarray(after.code_count)[restarted], 1.0)
    np.testing.assert_array_equal(np.asarray(after.code_count)[~restarted], counts[~restarted])
    np.testing.assert_array_equal(np.asarray(after.code_total)[~restarted], np.asarray(without.code_total)[~restarted])
    norms = np.linalg.norm(np.asarray(after.code_total)[restarted], axis=-1)
    np.testing.assert_allclose(norms, cfg.d_k**0.25, rtol=1e-4)  # every key has this norm


def test_candidates_come_from_unmasked_keys_only() -> None:
    keys_ = jnp.arange(2 * 1 * 6 * 1, dtype=jnp.float32).reshape(2, 1, 6, 1)
    mask = jnp.asarray([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0]], jnp.float32)
    drawn = codebook.draw_keys(keys_, mask, 200, rng.root(0))
    assert set(np.asarray(drawn).reshape(-1).tolist()) == {0.0, 3.0, 10.0}


@pytest.mark.slow
def test_recomputing_changes_nothing() -> None:
    def slope(remat: Remat) -> Any:
        cfg = dataclasses.replace(PLAIN, remat=remat)
        params, buffers = model(cfg)
        carry = family.FAMILY.empty_carry(cfg, 2)
        gradient = jax.grad(lambda p: family.loss(p, buffers, carry, batch(), None, 0, cfg)[0])
        return jax.jit(gradient)(params)

    kept = slope("none")
    for again in (slope("some"), slope("full")):
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_bfloat16_activations_over_float32_parameters() -> None:
    cfg = dataclasses.replace(PLAIN, dtype="bfloat16")
    params, buffers = model(cfg)
    gradient, aux = jax.grad(family.loss, has_aux=True)(
        params, buffers, family.FAMILY.empty_carry(cfg, 2), batch(), None, 0, cfg
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert aux.carry.attention.values.dtype == jnp.bfloat16
    assert aux.carry.attention.total.dtype == jnp.float32
    assert loss_of(cfg, None) == pytest.approx(loss_of(PLAIN, None), rel=0.02)


@pytest.mark.slow
def test_collapsed_codebook_raises_an_alarm(tmp_path: Path) -> None:
    source = tiny.corpus(tmp_path)
    changes = {"optim.steps": 5, "optim.warmup_steps": 0, "train.collapse_alarm": 1.0}
    train(tiny.config(source, **changes), RunFolder(tmp_path / "run"), quiet=True)
    alarms = [r for r in read_metrics(tmp_path / "run") if r.get("event") == "alarm"]
    assert len(alarms) == 2  # one for each unit, said once
    assert "collapses" in alarms[0]["message"]
    last = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "train"][-1]
    assert len(last["codebook"]["dead"]) == 2
