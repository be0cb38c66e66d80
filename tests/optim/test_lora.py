"""Low-rank adapters: step 0 is the base model, gradients are those of the merged weights, and a run is complete by itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from finetuned_runs import begun, other_text, parent_run, tuned
from run_comparison import assert_same_bits, lines

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.config.tuning import LoraConfig
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.core.pytree import n_bytes, named_leaves, replace
from linnet.data import load_dataset
from linnet.models import registry
from linnet.models.base import Keys
from linnet.optim.lora import Adapter, adapter_specs, merge, trainable_specs
from linnet.optim.optimizer import optimizer
from linnet.parallel import sharding
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run, open_state
from linnet.runs.state import TrainState, model_weights
from linnet.runs.weights_file import export_safetensors, import_safetensors
from linnet.train.loop import train
from linnet.train.step import make_step

Name = Literal["vq", "moe"]


def away_from_zero(state: TrainState) -> TrainState:
    """Adapters as after some training: `up` is not zero."""

    def one(adapter: Adapter) -> Adapter:
        return replace(adapter, up=0.1 * jax.random.normal(rng.root(1), adapter.up.shape))

    return replace(state, params={name: one(adapter) for name, adapter in state.params.items()})


def loss_of(cfg: RunConfig, params: Any, state: TrainState) -> Any:
    family, data = registry.get(cfg.family), load_dataset(cfg.tokens, cfg.seed)
    batch = jax.tree.map(jnp.asarray, data.batch(0))
    carry = family.empty_carry(cfg.model, cfg.data.batch_size)
    keys = Keys(update=rng.root(0), sequence=rng.root(1))
    return family.loss(params, state.buffers, carry, batch, keys, 0, cfg.model)[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_step_0_is_the_base_model_to_the_bit(family: Name, source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source, family)
    state = begun(tuned(run, source, **{"lora.rank": 2}))
    assert_same_bits(model_weights(state)[0], open_run(run).params)
    assert_same_bits(model_weights(state)[1], open_run(run).buffers)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_are_those_of_the_full_matrices(family: Name, source: Path, tmp_path: Path) -> None:
    """The oracle: W = base + scale * down @ up, so d down = scale * dW @ up^T and d up = scale * down^T @ dW."""
    cfg = tuned(
        parent_run(tmp_path, source, family),
        source,
        **{"lora.rank": 3, "lora.alpha": 4.5, "lora.targets": ("w_q", "embed")},
    )
    state = away_from_zero(begun(cfg))
    got = jax.jit(jax.grad(lambda adapters: loss_of(cfg, merge(state.base, adapters), state)))(state.params)
    full = jax.jit(jax.grad(lambda params: loss_of(cfg, params, state)))(merge(state.base, state.params))
    matrices = dict(named_leaves(full))
    assert len(got) == 2
    for name, adapter in state.params.items():
        assert adapter.scale == 1.5
        d_matrix, flip = matrices[name], lambda x: jnp.swapaxes(x, -1, -2)
        np.testing.assert_allclose(got[name].down, 1.5 * d_matrix @ flip(adapter.up), atol=2e-6, rtol=2e-4)
        np.testing.assert_allclose(got[name].up, 1.5 * flip(adapter.down) @ d_matrix, atol=2e-6, rtol=2e-4)


@pytest.mark.slow
def test_at_full_rank_an_adapter_can_be_any_matrix(source: Path, tmp_path: Path) -> None:
    """down = identity at the full rank, scale 1: training `up` is training the matrix, and its gradient is the matrix's."""
    cfg = tuned(parent_run(tmp_path, source), source, **{"lora.rank": 16, "lora.alpha": 16.0, "lora.targets": ("w_q",)})
    state = away_from_zero(begun(cfg))
    identity = jnp.broadcast_to(jnp.eye(16), state.params["units/w_q"].down.shape)
    adapters = {"units/w_q": replace(state.params["units/w_q"], down=identity)}
    got = jax.jit(jax.grad(lambda a: loss_of(cfg, merge(state.base, a), state)))(adapters)["units/w_q"].up
    want = jax.jit(jax.grad(lambda p: loss_of(cfg, p, state)))(merge(state.base, adapters)).units.w_q
    np.testing.assert_allclose(got, want, atol=1e-7, rtol=1e-5)


def test_update_leaves_the_base_alone_and_moves_adapters_and_codebooks(source: Path, tmp_path: Path) -> None:
    cfg = tuned(parent_run(tmp_path, source), source, **{"lora.rank": 2, "optim.warmup_steps": 0})
    before = jax.tree.map(np.asarray, begun(cfg))
    family = registry.get("vq")
    step = make_step(family, cfg, optimizer(cfg.optim, trainable_specs(family, cfg)), sharding.make_mesh())
    data = load_dataset(cfg.tokens, cfg.seed)
    state = begun(cfg)
    for i in range(2):
        state, _ = step(state, jax.tree.map(jnp.asarray, data.batch(i)))
    assert_same_bits(state.base, before.base)
    moved = {
        name
        for name, leaf in named_leaves(state.params)
        if not np.array_equal(leaf, dict(named_leaves(before.params))[name])
    }
    assert len(moved) == 8  # both factors of four matrices
    assert not np.array_equal(state.buffers.code_total, before.buffers.code_total)  # codebooks follow the keys


def test_frozen_weights_are_not_in_the_optimizer_state(source: Path, tmp_path: Path) -> None:
    run = parent_run(tmp_path, source, **{"model.d_model": 64, "model.d_v": 64, "train.ema_decay": None})
    full, adapted = begun(tuned(run, source)), begun(tuned(run, source, **{"lora.rank": 1}))
    weights = n_bytes(full.params)
    assert n_bytes(full.opt_state) > 2 * weights  # adamw: two moments
    assert n_bytes(adapted.opt_state) < 0.1 * weights
    assert n_bytes(adapted.base) == weights


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vq", pytest.param("moe", marks=pytest.mark.trial)])
def test_run_with_adapters_resumes_exactly_and_is_complete_by_itself(
    family: Name, source: Path, tmp_path: Path
) -> None:
    run = parent_run(tmp_path, source, family)
    cfg = tuned(run, other_text(tmp_path), **{"lora.rank": 2})
    assert train(cfg, RunFolder(tmp_path / "whole"), quiet=True).finished
    assert not train(cfg, RunFolder(tmp_path / "cut"), quiet=True, stop_at=3).finished
    shutil.rmtree(run)
    assert train(cfg, RunFolder(tmp_path / "cut"), quiet=True).finished
    whole = open_state(tmp_path / "whole", "latest")[1]
    assert_same_bits(open_state(tmp_path / "cut", "latest")[1], whole)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")

    # Merged where it is used: opened, exported and read back; and in 8 bits.
    opened = open_run(tmp_path / "whole", "latest")
    assert_same_bits(opened.params, model_weights(whole)[0])
    assert opened.cfg.lora == LoraConfig()
    export_safetensors(opened.params, opened.buffers, codec.to_json(opened.cfg), tmp_path / "model.safetensors")
    params, buffers, exported = import_safetensors(tmp_path / "model.safetensors")
    assert_same_bits((params, buffers), (opened.params, opened.buffers))
    assert (exported["parent"]["path"], exported["parent"]["adapters"]) == (str(run), 2)
    lowered = open_run(tmp_path / "whole", "latest", weights="int8")
    kinds = {leaf.dtype for leaf in jax.tree.leaves(lowered.params)}
    assert np.dtype(np.int8) in kinds

    # A checkpoint holds no frozen weight: what it has of the model are adapters and codebooks.
    manifest = json.loads(next((tmp_path / "whole" / "checkpoints").glob("*6/manifest/manifest.json")).read_text())
    names = set(manifest["leaves"])
    assert any(name.endswith("/down") for name in names)
    assert not any(name.startswith("base") or name == "params/embed" for name in names)


def test_corrupt_base_is_rejected(source: Path, tmp_path: Path) -> None:
    cfg = tuned(parent_run(tmp_path, source), source, **{"lora.rank": 2})
    train(cfg, RunFolder(tmp_path / "out"), quiet=True, stop_at=0)
    manifest = next((tmp_path / "out" / "base").glob("*/manifest/manifest.json"))
    manifest.write_text(manifest.read_text().replace('"sum":', '"sum": 1', 1))
    with pytest.raises(UserError, match="damaged"):
        open_run(tmp_path / "out")


def test_targets_are_named_by_parts_of_their_names() -> None:
    specs = registry.get("moe").param_specs(tiny.MOE)

    def chosen(*targets: str) -> list[str]:
        return list(adapter_specs(specs, LoraConfig(rank=2, targets=targets), registry.get("moe")))

    assert chosen() == ["layers/w_q", "layers/w_k", "layers/w_v", "layers/w_o"]
    assert chosen("w_o", "embed") == ["embed", "layers/w_o"]
    assert chosen("experts") == [f"layers/experts/{part}" for part in ("gate", "value", "out")]
    gate = adapter_specs(specs, LoraConfig(rank=2, targets=("experts",)), registry.get("moe"))["layers/experts/gate"]
    assert gate.down.shape == (2, 4, 16, 2)  # each expert of each layer has its own
    with pytest.raises(UserError, match="lora.targets is 'q'"):
        chosen("q")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": -1}, "lora.rank is -1"),
        ({"rank": 2, "alpha": 0.0}, "lora.alpha is 0"),
        ({"targets": ("w_q",)}, "above 0 where lora.targets is set"),
    ],
)
def test_impossible_settings_are_rejected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LoraConfig(**values)


def test_prior_has_no_adapters() -> None:
    from linnet.config import presets

    cfg = dataclasses.replace(presets.get("prior-emoji"), lora=LoraConfig(rank=4))
    with pytest.raises(UserError, match="lora.rank is 4, but it must be 0 with family 'prior'"):
        trainable_specs(registry.get("prior"), cfg)
