"""Settings, for every family: whole through their file, flags of the family's own, wrong ones rejected with what would do."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import subjects

from linnet.cli import main
from linnet.config import codec, presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError
from linnet.models import registry
from linnet.models.moe.config import MoEConfig


def test_every_setting_is_in_the_file_and_comes_back(subject: str, folder: Path, tmp_path: Path) -> None:
    cfg = subjects.config(subject, folder, **{"model.dtype": "bfloat16", "model.remat": "full", "seed": 7})
    codec.save(cfg, tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["family"] == cfg.family
    assert set(written["model"]) == {field.name for field in dataclasses.fields(registry.config_class(cfg.family))}
    assert codec.load(tmp_path / "config.json") == cfg


def test_help_shows_the_familys_own_flags(
    subject: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = subjects.config(subject, folder)
    codec.save(cfg, tmp_path / "config.json")
    with pytest.raises(SystemExit) as exit:
        main(["train", str(tmp_path / "config.json"), "--help"])
    assert not exit.value.code
    out = capsys.readouterr().out
    models = {name: registry.config_class(name) for name in registry.names()}
    for name, model in models.items():
        others = {f.name for other, model in models.items() if other != name for f in dataclasses.fields(model)}
        for field in dataclasses.fields(model):
            flag = f"--model.{field.name.replace('_', '-')}"
            if name == cfg.family or field.name not in others:
                assert bool(re.search(rf"{flag}(?![-\w])", out)) == (name == cfg.family), flag


def test_wrong_setting_of_the_model_is_rejected_by_its_name(subject: str, folder: Path, tmp_path: Path) -> None:
    values = codec.to_json(subjects.config(subject, folder))
    for change, words in (({"n_cod": 3}, "unknown setting model."), ({"dtype": "float7"}, "model.dtype is 'float7'")):
        (tmp_path / "config.json").write_text(json.dumps(values | {"model": values["model"] | change}))
        with pytest.raises(UserError, match=words):
            codec.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n_choice": 9}, r"model.n_choice is 9, but it must be at most model.n_expert .8"),
        ({"n_q_head": 3}, r"model.n_q_head is 3, but it must be a multiple of model.n_kv_head .2"),
        ({"d_k": 31}, "use 32"),
        ({"n_expert": 0}, "set --model.n-expert"),
        ({"pad_id": 259}, r"below model.n_vocab .259"),
        ({"balance_weight": -0.1}, "use 0 for none"),
        ({"score_cap": 0.0}, "model.score_cap"),
        ({"rope_base": 1.0}, "use 10000"),
    ],
)
def test_invalid_moe_config_is_rejected_with_the_fix(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        MoEConfig(**values)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--data.sequence-len", "1024", "--data.update-len", "1024"],
            "data.sequence_len is 1024.*model.context (512)",
        ),
        (["--data.update-len", "256"], "data.update_len is 256.*in one update. Fix: use 512"),
        (["--model.n-choice", "9"], "at most model.n_expert (8)"),
        (["--model.n-q-head", "5"], "a multiple of model.n_kv_head (2)"),
        (["--train.accumulate", "3"], "a multiple of train.accumulate (3)"),
        (["--model.n-code", "9"], "--model.n-code"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_wrong_flags_exit_before_any_work(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["train", "moe-cpu", *flags, "--out", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    output = " ".join((out + err).split())
    for part in words.split(".*"):
        assert part in output
    assert not (tmp_path / "run").exists()


def test_family_takes_no_other_familys_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model is 'VQConfig', but it must be MoEConfig"):
        RunConfig(family="moe")
    values = codec.to_json(presets.get("moe-cpu"))
    for change, words in (
        ({"family": "vq"}, "unknown setting model."),
        ({"family": "cnn"}, "one of vq, moe, prior, toy"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(UserError, match=words):
            codec.load(tmp_path / "config.json")


def test_config_without_a_family_is_vq(tmp_path: Path) -> None:
    values = codec.to_json(presets.get("quickstart"))
    del values["family"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert codec.load(tmp_path / "config.json") == presets.get("quickstart")
