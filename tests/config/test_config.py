"""Configs: checked when made, written and read back whole, unknown settings rejected with the fix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from linnet.config import codec, presets
from linnet.config.schema import DataConfig, OptimConfig, RunConfig, TrainConfig
from linnet.core.errors import UserError
from linnet.models.vq.config import VQConfig


@pytest.mark.parametrize("name", list(presets.PRESETS))
def test_every_preset_survives_its_file(name: str, tmp_path: Path) -> None:
    cfg = presets.get(name)
    codec.save(cfg, tmp_path / "config.json")
    assert codec.load(tmp_path / "config.json") == cfg
    assert cfg.preset == name


def test_paper_presets_have_the_papers_sizes() -> None:
    enwik8, pg19, imagenet = (presets.get(name) for name in ("enwik8", "pg19", "imagenet64"))
    for cfg, sizes in ((enwik8, (768, 128, 1536)), (pg19, (2048, 128, 4096)), (imagenet, (2048, 128, 4096))):
        assert (cfg.vq.d_model, cfg.vq.d_k, cfg.vq.d_v) == sizes
        assert (cfg.vq.n_head, cfg.vq.n_layer, cfg.vq.n_code) == (1, 24, 512)
        assert (cfg.vq.block_len, cfg.vq.mem_len, cfg.data.batch_size) == (512, 512, 128)
        assert (cfg.vq.c_beta, cfg.vq.c_gamma, cfg.optim.warmup_steps) == (1e-4, 0.99, 10_000)
    assert (enwik8.tokens.sequence_len, enwik8.tokens.update_len, enwik8.optim.steps) == (8192, 2048, 125_000)
    assert (imagenet.tokens.sequence_len, imagenet.tokens.update_len, imagenet.optim.steps) == (12_288, 1536, 500_000)
    assert (enwik8.optim.name, enwik8.optim.lr, enwik8.optim.clip, enwik8.optim.decay) == ("adamw", 4e-4, 0.1, 2e-4)
    assert (pg19.optim.name, pg19.optim.lr, pg19.optim.clip, pg19.optim.decay) == ("adafactor", 0.01, None, 0.0)


BAD: list[tuple[type, dict[str, Any], str]] = [
    (VQConfig, {"n_layer": 0}, "model.n_layer is 0"),
    (VQConfig, {"d_model": 33}, "use 34"),
    (VQConfig, {"p_dropres": 1.0}, "model.p_dropres"),
    (VQConfig, {"c_gamma": 1.5}, "model.c_gamma"),
    (DataConfig, {"sequence_len": 1000, "update_len": 300}, "use 1200"),
    (DataConfig, {"batch_size": 0}, "data.batch_size"),
    (DataConfig, {"validation_fraction": 0.6, "test_fraction": 0.6}, "below 1"),
    (OptimConfig, {"lr": 0.0}, "optim.lr"),
    (OptimConfig, {"steps": 10, "warmup_steps": 10}, "below optim.steps"),
    (OptimConfig, {"clip": 0.0}, "optim.clip"),
    (TrainConfig, {"accumulate": 0}, "train.accumulate"),
    (TrainConfig, {"ema_decay": 1.0}, "train.ema_decay"),
]


@pytest.mark.parametrize(("cls", "values", "words"), BAD, ids=lambda x: str(x))
def test_bad_settings_are_rejected_with_the_fix(cls: type, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        cls(**values)
    assert "Fix:" in str(caught.value)


def test_block_must_divide_update() -> None:
    with pytest.raises(UserError, match="a multiple of model.block_len .128.*use 1024"):
        RunConfig(data=DataConfig(sequence_len=1000, update_len=1000))


def test_accumulation_must_divide_batch() -> None:
    with pytest.raises(UserError, match="a multiple of train.accumulate .3.*use 9"):
        RunConfig(train=TrainConfig(accumulate=3))


def _write(tmp_path: Path, change: dict[str, Any]) -> Path:
    values = codec.to_json(presets.get("quickstart"))
    for name, value in change.items():
        *path, last = name.split(".")
        at = values
        for part in path:
            at = at[part]
        at[last] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.n_layers": 3}, "unknown setting model.'n_layers'; did you mean 'n_layer'"),
        ({"model.n_layer": "3"}, "model.n_layer is '3', but it must be of type int"),
        ({"model.agg_cache": 1}, "model.agg_cache is 1"),
        ({"optim.name": "sgd"}, "optim.name is 'sgd', but it must be one of 'adamw'"),
        ({"data.validation_files": "x"}, "data.validation_files"),
        ({"version": 99}, "version"),
        ({"model": 3}, "model"),
    ],
)
def test_bad_files_are_rejected(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        codec.load(_write(tmp_path, change))


def test_integers_are_accepted_for_floats(tmp_path: Path) -> None:
    assert codec.load(_write(tmp_path, {"optim.lr": 1})).optim.lr == 1.0


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run"):
        codec.load(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        codec.load(tmp_path / "config.json")


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.get("quickstart").seed = 3  # pyright: ignore[reportAttributeAccessIssue]
