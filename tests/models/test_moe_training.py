"""What is special in training `moe`: losses of the routers, figures of the experts, masks, and the dense model to compare with."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from linnet.config import presets
from linnet.core import params as weights
from linnet.core import rng
from linnet.core.params import Spec, is_spec
from linnet.data import Batch
from linnet.models.moe import family
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import MoEParams
from linnet.nn import moe as ex
from linnet.nn.remat import Remat
from linnet.report.build import render
from linnet.runs.folder import RunFolder
from linnet.runs.metrics import read_metrics
from linnet.train.loop import train

CFG = tiny.MOE


@functools.cache
def fresh(cfg: MoEConfig = CFG) -> MoEParams:
    return weights.init(family.param_specs(cfg), rng.root(0))


def batch(masked: int = 0, rows: int = 4) -> Batch:
    tokens = np.random.default_rng(0).integers(3, 259, (rows, 17)).astype(np.int32)
    mask = np.ones((rows, 16), np.float32)
    mask[:, 16 - masked :] = 0
    return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], doc_ids=np.zeros((rows, 16), np.int32), loss_mask=mask)


def full_loss(params: MoEParams, data: Batch, cfg: MoEConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    value, aux = family.loss(params, None, None, data, None, 0, cfg)
    return value, aux.metrics


# Compiled once for each config and shape: most of the time of these tests is compiling.
LOSS = jax.jit(full_loss, static_argnums=2)
SLOPE = jax.jit(jax.grad(lambda *a: full_loss(*a)[0]), static_argnums=2)


def evaluated(data: Batch, cfg: MoEConfig = CFG) -> tuple[float, dict[str, np.ndarray]]:
    value, metrics = LOSS(fresh(cfg), data, cfg)
    return float(value), {name: np.asarray(x) for name, x in metrics.items()}


def test_loss_is_its_three_parts() -> None:
    cfg = dataclasses.replace(CFG, balance_weight=0.3, z_weight=0.2)
    total, metrics = evaluated(batch(), cfg)
    routers = cfg.n_layer * (0.3 * metrics["loss_balance"] + 0.2 * metrics["loss_router_z"])
    assert total == pytest.approx(float(metrics["loss_lm_per_token_unscaled"] + routers), rel=1e-6)
    assert metrics["loss_router_z"] > 0


def test_routers_losses_even_out_and_calm_down() -> None:
    """One step down either loss alone, from a router that prefers one expert and has large logits, makes it smaller."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 16)) + 1.0, jnp.float32)
    router = jnp.asarray(np.random.default_rng(2).normal(size=(16, 4)), jnp.float32).at[:, 1].add(0.5)

    for loss in (ex.balance_loss, ex.z_loss):

        def cost(router: jax.Array, loss: Any = loss) -> jax.Array:
            return loss(ex.route(x, router, 2), jnp.ones(64))

        before, slope = jax.value_and_grad(cost)(router)
        assert float(cost(router - 0.01 * slope)) < float(before)


def test_masked_tokens_neither_count_nor_cost() -> None:
    some = batch(masked=5)
    changed = Batch(
        inputs=some.inputs.copy(), targets=some.targets.copy(), doc_ids=some.doc_ids, loss_mask=some.loss_mask
    )
    changed.targets[:, -5:] = 7
    changed.inputs[:, -5:] = 9  # the past does not see them
    for name in ("loss_lm_per_token_unscaled", "loss_balance", "loss_router_z", "expert_load"):
        np.testing.assert_allclose(evaluated(some)[1][name], evaluated(changed)[1][name], rtol=1e-5, err_msg=name)
    assert not np.allclose(evaluated(some)[1]["expert_load"], evaluated(batch())[1]["expert_load"])
    np.testing.assert_allclose(evaluated(some)[1]["expert_load"].sum(axis=-1), 1.0, rtol=1e-6)


def test_balance_loss_of_micro_batches_is_their_mean() -> None:
    """Language and router-z losses are means over tokens and do not care; balance is a product of two means. The mean over parts is
    not the whole's: with accumulation experts are evened out within each micro-batch."""
    data = batch()
    halves = [jax.tree.map(lambda x, a=a: x[a : a + 2], data) for a in (0, 2)]
    full, parts = evaluated(data)[1], [evaluated(half)[1] for half in halves]
    for name in ("loss_lm_per_token_unscaled", "loss_router_z", "expert_load"):
        np.testing.assert_allclose(full[name], (parts[0][name] + parts[1][name]) / 2, rtol=1e-5, err_msg=name)
    mean = (parts[0]["loss_balance"] + parts[1]["loss_balance"]) / 2
    assert abs(float(mean - full["loss_balance"])) > 1e-4


def test_figures_of_the_experts() -> None:
    load = jnp.asarray([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    metrics = {"expert_load": load, "router_confidence": jnp.asarray([0.6, 0.9])}
    figures = family.diagnostics(None, metrics, CFG)["experts"]
    assert figures["balance"] == pytest.approx([1.0, 0.5])
    assert figures["busiest"] == [0.25, 0.5]
    assert figures["idlest"] == [0.25, 0.0]
    assert figures["confidence"] == pytest.approx([0.6, 0.9])
    collapse_warnings = family.collapse_warnings({"experts": figures}, 0.1, CFG)
    assert list(collapse_warnings) == [1]
    assert "layer 1 collapse" in collapse_warnings[1]
    assert "--model.balance-weight" in collapse_warnings[1]


@pytest.mark.trial
@pytest.mark.parametrize("remat", ["some", "full"])
def test_recomputing_changes_nothing(remat: Remat) -> None:
    again = dataclasses.replace(CFG, remat=remat)
    slopes = (SLOPE(fresh(), batch(), cfg) for cfg in (CFG, again))
    for a, b in zip(*map(jax.tree.leaves, slopes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.trial
def test_bfloat16_activations_over_float32_parameters() -> None:
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    slope = SLOPE(fresh(), batch(), cfg)
    assert {leaf.dtype for leaf in jax.tree.leaves(slope)} == {jnp.dtype("float32")}
    assert evaluated(batch(), cfg)[0] == pytest.approx(evaluated(batch())[0], rel=0.02)


# The dense model of equal active parameters


def counted(cfg: MoEConfig) -> tuple[int, int]:
    """Parameters that a token goes through, and all."""
    specs = family.param_specs(cfg)

    def size(spec: Spec) -> int:
        chosen = cfg.n_choice / cfg.n_expert if "experts" in spec.axes else 1
        return round(spec.size * chosen)

    return sum(size(s) for s in jax.tree.leaves(specs, is_leaf=is_spec)), weights.count(specs)


def test_dense_preset_has_the_active_parameters_of_moe_cpu() -> None:
    moe, dense = presets.get("moe-cpu"), presets.get("dense-cpu")
    assert isinstance(moe.model, MoEConfig)
    assert isinstance(dense.model, MoEConfig)
    assert dense.model.d_ffn == moe.model.n_choice * moe.model.d_ffn
    routers = moe.model.n_layer * moe.model.d_model * (moe.model.n_expert - 1)  # a dense model chooses nothing
    assert counted(moe.model) == (775_168, 2_544_640)
    assert counted(dense.model) == (775_168 - routers, 775_168 - routers)
    for part in ("data", "optim", "train", "seed"):
        assert getattr(moe, part) == getattr(dense, part)


def test_one_expert_is_a_plain_gated_layer() -> None:
    """Its weight is exactly 1, so the router has no part in the model, and learns nothing."""
    cfg = dataclasses.replace(CFG, n_expert=1, n_choice=1, balance_weight=0.0, z_weight=0.0)
    params = fresh(cfg)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 16)), jnp.float32)
    assert np.all(np.asarray(ex.route(x, params.layers.router[0], 1).weight) == 1.0)
    slope = SLOPE(params, batch(), cfg)
    assert np.all(np.asarray(slope.layers.router) == 0.0)
    assert evaluated(batch(), cfg)[1]["expert_load"].tolist() == [[1.0]] * cfg.n_layer


# A run


def test_run_logs_expert_metrics(tmp_path: Path) -> None:
    source = tiny.corpus(tmp_path)
    changes = {"optim.steps": 10, "optim.warmup_steps": 0, "train.collapse_alarm": 1.0, "train.eval_every": 0}
    train(tiny.config(source, "moe", **changes), RunFolder(tmp_path / "run"), quiet=True)
    records = read_metrics(tmp_path / "run")
    last = [r for r in records if r["kind"] == "train"][-1]
    assert np.shape(last["experts"]["load"]) == (2, 4)
    assert math.isclose(sum(last["experts"]["load"][0]), 1.0, rel_tol=1e-5)
    assert last["loss_balance"] > 0.9
    assert last["loss_router_z"] > 0
    assert any("experts of layer" in r["message"] for r in records if r.get("event") == "alarm")
    page = render(tmp_path / "run")
    assert "<h2>Experts</h2>" in page
    assert "odebook" not in page.split("<h2>Config</h2>")[0]
