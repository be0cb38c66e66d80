"""Runs that are weights alone: written whole or not at all, opened bit for bit, trained from step 0 where they are floats."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core import params as weights
from linnet.core import quant, rng
from linnet.core.errors import UserError
from linnet.core.pytree import named_leaves
from linnet.models import registry
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run, open_state, write_run
from linnet.runs.state import fresh_buffers
from linnet.runs.stored_array import Leaf
from linnet.runs.weights import has_weights, write_stored_run
from linnet.train.loop import train
from linnet.train.resume import check_resumable


def model(cfg: RunConfig) -> Any:
    family = registry.get(cfg.family)
    specs = family.param_specs(cfg.model)
    return jax.jit(lambda: weights.init(specs, rng.root(3)))()


def leaf(name: str, value: Any) -> Leaf:
    array = np.asarray(value)

    def parts() -> Iterator[np.ndarray]:
        yield from array[:, None] if array.ndim > 1 else [array]  # row by row, as a stack comes layer by layer

    return Leaf(name=name, shape=array.shape, dtype=array.dtype, parts=parts)


def write(out: Path, cfg: RunConfig, params: Any, **changes: Any) -> None:
    leaves = [leaf(name, value) for name, value in named_leaves(params)]
    write_stored_run(out, cfg, leaves, changes.get("finish", lambda _: None), lambda _: None)


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return tiny.config(tiny.corpus(tmp_path))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y)


def test_run_opens_as_it_was_written(tmp_path: Path, cfg: RunConfig) -> None:
    params = model(cfg)
    write(tmp_path / "run", cfg, params, finish=lambda folder: (folder / "beside").write_text("x"))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["beside", "config.json", "weights"]
    run = open_run(tmp_path / "run")
    assert (run.cfg, run.step) == (cfg, 0)
    same(run.params, params)
    same(run.buffers, fresh_buffers(run.family, cfg))
    for name in ("latest", "0"):
        same(open_run(tmp_path / "run", name).params, params)
    with pytest.raises(UserError, match="imported weights"):
        open_run(tmp_path / "run", "7")


def test_requested_weight_dtype_applies_to_any_run(tmp_path: Path, cfg: RunConfig) -> None:
    params = model(cfg)
    write(tmp_path / "run", cfg, params)
    specs = registry.get(cfg.family).param_specs(cfg.model)
    for kept_back in ("bfloat16", "int8"):
        same(open_run(tmp_path / "run", weights=kept_back).params, quant.cast_params(params, specs, kept_back))


def test_eight_bits_come_back_as_pairs(tmp_path: Path, cfg: RunConfig) -> None:
    specs = registry.get(cfg.family).param_specs(cfg.model)
    lowered = quant.cast_params(model(cfg), specs, "int8")
    assert any(quant.is_quantized(x) for x in jax.tree.leaves(lowered, is_leaf=quant.is_quantized))
    write(tmp_path / "run", cfg, lowered)
    same(open_run(tmp_path / "run").params, lowered)
    index = json.loads((tmp_path / "run" / "weights" / "index.json").read_text())["leaves"]
    for name, entry in index.items():
        if name.endswith("/weight"):
            assert index[name.removesuffix("weight") + "scales"]["file"] == entry["file"]


@pytest.mark.trial
def test_training_begins_with_the_weights(tmp_path: Path, cfg: RunConfig) -> None:
    """Three updates end where those of a run with a checkpoint of the same weights end; then its own checkpoints are the run."""
    params = model(cfg)
    write(tmp_path / "stored", cfg, params)
    write_run(tmp_path / "saved", cfg, params, fresh_buffers(registry.get(cfg.family), cfg))
    for name in ("stored", "saved"):
        train(cfg, RunFolder(tmp_path / name), quiet=True, stop_at=3)
    _, stored, step = open_state(tmp_path / "stored", "latest")
    _, saved, _ = open_state(tmp_path / "saved", "latest")
    assert step == 3
    same(stored.params, saved.params)
    assert open_run(tmp_path / "stored", "latest").step == 3


def test_before_training_all_but_the_model_may_change(tmp_path: Path, cfg: RunConfig) -> None:
    write(tmp_path / "run", cfg, model(cfg))
    folder = RunFolder(tmp_path / "run")
    slower = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=1e-5))
    assert check_resumable(slower, folder) == cfg
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.vq, pe_lam=10.0))
    with pytest.raises(UserError, match=r"model\.pe_lam"):
        check_resumable(other, folder)


def test_eight_bits_are_not_trained(tmp_path: Path, cfg: RunConfig) -> None:
    specs = registry.get(cfg.family).param_specs(cfg.model)
    write(tmp_path / "run", cfg, quant.cast_params(model(cfg), specs, "int8"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="8-bit weights, which cannot be trained.*grok-hf"):
        train(cfg, RunFolder(tmp_path / "run"), quiet=True)
    assert sorted(tmp_path.rglob("*")) == before


# Whole or not at all.


def nothing_but(tmp_path: Path, *names: str) -> None:
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "corpus.txt") == sorted(names)


@pytest.mark.parametrize("error", [UserError("bad"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_import_that_fails_leaves_nothing(tmp_path: Path, cfg: RunConfig, error: BaseException) -> None:
    leaves = [leaf(name, value) for name, value in named_leaves(model(cfg))]

    def fails() -> Iterator[np.ndarray]:
        raise error
        yield

    leaves[3] = Leaf(name=leaves[3].name, shape=leaves[3].shape, dtype=leaves[3].dtype, parts=fails)
    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        write_stored_run(tmp_path / "run", cfg, leaves, lambda _: None, lambda _: None)
    nothing_but(tmp_path)


def test_values_that_are_not_finite_leave_nothing(tmp_path: Path, cfg: RunConfig) -> None:
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), model(cfg))
    with pytest.raises(UserError, match="not finite"):
        write(tmp_path / "run", cfg, params)
    nothing_but(tmp_path)


def test_nothing_is_overwritten(tmp_path: Path, cfg: RunConfig) -> None:
    params = model(cfg)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", cfg, params)
    assert has_weights(tmp_path / "empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("hello")
    for name in ("empty", "mine", "corpus.txt"):
        with pytest.raises(UserError, match="Fix: choose another"):
            write(tmp_path / name, cfg, params)
    nothing_but(tmp_path, "empty", "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "hello"


def test_full_disk_is_detected_before_writing(tmp_path: Path, cfg: RunConfig, monkeypatch: Any) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    with pytest.raises(UserError, match="1,000"):
        write(tmp_path / "run", cfg, model(cfg))
    nothing_but(tmp_path)


def test_leftovers_of_a_killed_import_are_removed_and_a_running_one_is_kept(tmp_path: Path, cfg: RunConfig) -> None:
    part = tmp_path / ".run.part"
    (part / "weights").mkdir(parents=True)
    (part / "weights" / "embed.safetensors").write_text("half")
    lock = os.open(part, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another process"):
            write(tmp_path / "run", cfg, model(cfg))
        assert (part / "weights" / "embed.safetensors").read_text() == "half"
    finally:
        os.close(lock)
    write(tmp_path / "run", cfg, model(cfg))
    same(open_run(tmp_path / "run").params, model(cfg))
    nothing_but(tmp_path, "run")


# Damage.


def index_of(run: Path) -> tuple[Path, dict[str, Any]]:
    path = run / "weights" / "index.json"
    return path, json.loads(path.read_text())


def corrupt(run: Path, how: str) -> None:
    path, index = index_of(run)
    name, entry = next(iter(index["leaves"].items()))
    file = run / "weights" / entry["file"]
    if how == "a bit":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    elif how == "leaf gone":
        del index["leaves"][name]
    elif how == "leaf more":
        index["leaves"]["more"] = entry
    elif how == "shape":
        entry["shape"] = [*entry["shape"], 1]
    elif how == "elsewhere":
        entry["file"] = "../config.json"
    elif how == "version":
        index["version"] = 9
    path.write_text("{" if how == "no index" else json.dumps(index))


@pytest.mark.parametrize(
    "how", ["a bit", "cut", "gone", "leaf gone", "leaf more", "shape", "elsewhere", "version", "no index"]
)
def test_corrupt_run_is_rejected(tmp_path: Path, cfg: RunConfig, how: str) -> None:
    write(tmp_path / "run", cfg, model(cfg))
    corrupt(tmp_path / "run", how)
    with pytest.raises(UserError, match="Fix"):
        open_run(tmp_path / "run")


def test_another_model_in_the_config_is_rejected(tmp_path: Path, cfg: RunConfig) -> None:
    write(tmp_path / "run", cfg, model(cfg))
    larger = dataclasses.replace(cfg, model=dataclasses.replace(cfg.vq, d_model=32))
    codec.save(larger, tmp_path / "run" / "config.json")
    with pytest.raises(UserError, match="of shape"):
        open_run(tmp_path / "run")
