"""Checkpoints of the reference's prior become runs, runs become files, and both come back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_prior import config, model
from torch_files import Writer

from linnet.cli import main
from linnet.config import codec
from linnet.config.schema import OptimConfig, PairsConfig
from linnet.models.prior.convert import to_reference
from linnet.models.prior.schedule import betas
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run
from linnet.train.resume import check_resumable

CFG = config(depth=1, timesteps=12, schedule="linear", text_encodings=False)
SETTINGS = {
    "net": {"dim": 16, "depth": 1, "heads": 2, "max_text_len": 5, "attn_dropout": 0.1, "self_cond": True},
    "predict_v": True,
    "loss_type": "l1",
    "cond_drop_prob": 0.3,
    "image_embed_scale": 2.0,
    "beta_schedule": "linear",
    "timesteps": 12,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def state(seed: int) -> dict[str, Any]:
        found = {f"net.{name}": value for name, value in to_reference(model(CFG, seed), CFG).items()}
        return {**found, "noise_scheduler.betas": betas("linear", 12)}

    path = tmp_path_factory.mktemp("checkpoint") / "trained.pth"
    return Writer().save(path, {"model": state(1), "ema_model": state(2), "step": 7, "version": "1.15.6"})


def linnet(*arguments: str | Path) -> Any:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_checkpoint_becomes_a_run_and_its_export_comes_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not linnet("import", "dalle2-prior", checkpoint)
    output = capsys.readouterr().out
    assert "EMA weights: width 16, 1 layers, 12 steps (linear); step 7, version 1.15.6." in output
    assert "Assumed, since weights do not show it: it predicts x_start, embeddings are scaled by 4" in output
    run = open_run(Path("runs/trained"))
    assert run.cfg.prior == CFG
    same(run.params, model(CFG, 2))
    assert not linnet("export", "runs/trained", "--out", "prior.safetensors")
    assert not linnet("import", "safetensors", "prior.safetensors", "--out", "again", "--source", "elsewhere")
    again = open_run(Path("again"))
    same(again.params, run.params)
    assert (again.cfg.prior, again.cfg.pairs.source) == (CFG, "elsewhere")
    # Until it is trained, its data and its training may still be chosen.
    chosen = dataclasses.replace(run.cfg, data=PairsConfig(source="others"), optim=OptimConfig(steps=500))
    assert check_resumable(chosen, RunFolder(Path("runs/trained"))) == run.cfg
    before = Path("runs/trained/config.json").read_bytes()
    assert linnet("import", "dalle2-prior", checkpoint) == 2
    assert "which is not overwritten" in capsys.readouterr().err
    assert Path("runs/trained/config.json").read_bytes() == before


def test_other_weight_sets_and_settings_not_in_the_weights(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"prior": SETTINGS, "data": {"image_url": "x"}, "train": {"lr": 5e-4, "use_ema": False, "random_seed": 3}}
    settings, out = tmp_path / "settings.json", tmp_path / "run"
    settings.write_text(json.dumps(full))
    flags = ("--settings", settings, "--which", "online", "--source", "pairs")
    assert not linnet("import", "dalle2-prior", checkpoint, "--out", out, *flags)
    assert "Online weights" in capsys.readouterr().out
    run = open_run(out)
    same(run.params, model(CFG, 1))
    cfg = run.cfg.prior
    assert (cfg.objective, cfg.loss, cfg.p_drop_text, cfg.scale, cfg.self_cond) == ("v", "l1", 0.3, 2.0, True)
    assert (cfg.p_drop_attention, cfg.text_encodings, cfg.max_text_len) == (0.1, True, 5)
    assert (run.cfg.optim.lr, run.cfg.train.ema_decay, run.cfg.seed, run.cfg.pairs.source) == (5e-4, None, 3, "pairs")
    settings.write_text(json.dumps({**SETTINGS, "condition_on_text_encodings": False}))
    assert linnet("import", "dalle2-prior", checkpoint, "--out", tmp_path / "no", *flags, "--text-encodings") == 2
    assert "--text-encodings is True" in capsys.readouterr().err
    settings.write_text(json.dumps(SETTINGS))  # its part `prior` alone will do
    assert not linnet("import", "dalle2-prior", checkpoint, "--out", tmp_path / "b", "--settings", settings)
    assert codec.load(tmp_path / "b" / "config.json").prior == cfg


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--settings", '{"net": {"dim": 16, "depth": 3}}'), "model.depth is 3, but it must be 1, as the weights are"),
        (("--settings", '{"net": {"dim": 16, "dept": 1, "depth": 1}}'), "did you mean 'depth'?"),
        (("--settings", "{"), "is not JSON"),
        (("--tokenizer", "x.model"), "--tokenizer"),
        (("--block-len", "8"), "a prior has no such setting"),
        (("--weights", "int8"), "--weights"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_mismatches_are_rejected_and_leave_nothing(
    flags: tuple[str, str], words: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = flags
    if name == "--settings":
        (tmp_path / "settings.json").write_text(value)
        value = str(tmp_path / "settings.json")
    assert linnet("import", "dalle2-prior", checkpoint, "--out", tmp_path / "run", name, value) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_file_that_would_execute_code_is_rejected_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return eval, ("1",)

    with zipfile.ZipFile(tmp_path / "evil.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"model": Evil()}, 2))
    assert linnet("import", "dalle2-prior", tmp_path / "evil.pth", "--out", tmp_path / "run") == 2
    assert "eval" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_token_encodings_can_be_stated_without_a_settings_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not linnet("import", "dalle2-prior", checkpoint, "--out", tmp_path / "plain")
    assert "texts have no token encodings" in capsys.readouterr().out
    assert not linnet("import", "dalle2-prior", checkpoint, "--out", tmp_path / "run", "--text-encodings")
    assert "texts have token encodings" in capsys.readouterr().out
    assert open_run(tmp_path / "run").cfg.prior.text_encodings
