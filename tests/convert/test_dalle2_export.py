"""Exported priors have the reference's names, order, tables and release, and come back bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from linnet.convert.dalle2.export import RELEASES, find_release, model_file, state_dict
from linnet.convert.dalle2.prior import read_prior_checkpoint
from linnet.convert.torch_pickle import read_torch
from linnet.convert.torch_writer import write_torch
from linnet.core.errors import UserError
from linnet.models.prior.convert import ROTARY, from_reference
from linnet.models.prior.reference import infer_config
from linnet.models.prior.releases import behaviour, family_of, recognize
from linnet.models.prior.schedule import tables

GOLDENS = Path(__file__).parents[1] / "goldens" / "prior"


def network_golden(path: Path) -> tuple[dict[str, np.ndarray], str | None, bool]:
    golden = np.load(path)
    state = {n.removeprefix("params/").removeprefix("net."): golden[n] for n in golden.files if n.startswith("params/")}
    meta = json.loads(str(golden["meta"]))
    version = meta.get("version") or (str(golden["out/version"]) if "out/version" in golden.files else None)
    return (
        {n: v for n, v in state.items() if "noise_scheduler" not in n},
        version,
        bool(meta["config"].get("self_cond")),
    )


@pytest.mark.parametrize(
    "path", [*sorted(GOLDENS.glob("legacy_*.npz")), *sorted(GOLDENS.glob("net_*.npz"))], ids=lambda path: path.stem
)
def test_every_golden_network_comes_out_by_its_own_names_in_their_order(path: Path, tmp_path: Path) -> None:
    state, version, self_cond = network_golden(path)
    release = recognize(state, version=version)
    cfg = infer_config(state, None, {"self_cond": self_cond}, release)
    content = model_file(from_reference(state, cfg), cfg)
    write_torch(tmp_path / "x.pth", content)
    found = {
        n.removeprefix("net."): v for n, v in read_torch(tmp_path / "x.pth")["model"].items() if n.startswith("net.")
    }
    assert list(found) == list(state)
    for name, value in state.items():
        if name.endswith(ROTARY):
            np.testing.assert_allclose(found[name], value, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert family_of(content["version"]) == release.family
    again = read_prior_checkpoint(tmp_path / "x.pth", {"self_cond": self_cond})
    settings = ("scores", "norms", "last_norm", "text_conditioning", "drop_text_embedding", "bias_scale")
    assert [getattr(again.cfg, name) for name in settings] == [getattr(cfg, name) for name in settings]
    if cfg.continuous_time:
        assert again.cfg.truncated_time == cfg.truncated_time
    if self_cond:
        assert again.cfg.self_cond_layout == cfg.self_cond_layout


def test_reference_files_round_trip(tmp_path: Path) -> None:
    """Whole state dicts: the tables of the noise schedule included."""
    for path in sorted((GOLDENS / "ckpt").glob("*_model.pth")):
        found, loaded = read_prior_checkpoint(path), read_torch(path)
        theirs: dict[str, Any] = loaded.get("model", loaded)
        ours = state_dict(found.params, found.cfg, find_release(found.cfg))
        assert list(ours) == list(theirs), path
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=2e-6, atol=1e-12, err_msg=f"{path} {name}")


def test_every_range_of_releases_is_recognized_by_its_settings() -> None:
    path = GOLDENS / "ckpt" / "warmup_1.15.6_model.pth"
    cfg = read_prior_checkpoint(path).cfg
    for release in RELEASES:
        settings = behaviour(release)
        self_cond = "self_cond_layout" in settings
        found = find_release(dataclasses.replace(cfg, continuous_time=True, self_cond=self_cond, **settings))
        assert behaviour(found) == settings, (release, found)
    with pytest.raises(UserError, match="no release"):
        find_release(dataclasses.replace(cfg, bias_scale=3.0))


def test_schedules_are_written_in_full(tmp_path: Path) -> None:
    cfg = read_prior_checkpoint(GOLDENS / "ckpt" / "warmup_1.15.6_model.pth").cfg
    assert np.isfinite(tables(cfg.schedule, cfg.timesteps).betas).all()
    state = state_dict(read_prior_checkpoint(GOLDENS / "ckpt" / "warmup_1.15.6_model.pth").params, cfg, "1.15.6")
    assert {value.dtype for value in state.values()} == {np.dtype("float32")}
    assert all(isinstance(value, np.ndarray) and value.flags.c_contiguous for value in jax.tree.leaves(state))


def test_safetensors_hold_the_same_state_dict(tmp_path: Path) -> None:
    from linnet.cli import main

    checkpoint = GOLDENS / "ckpt" / "warmup_1.1.0_model.pth"
    for arguments in (
        ("import", "dalle2-prior", checkpoint, "--out", tmp_path / "run"),
        ("export", tmp_path / "run", "--format", "dalle2-prior", "--out", tmp_path / "x.safetensors"),
        ("export", tmp_path / "run", "--format", "dalle2-prior", "--out", tmp_path / "x.pth"),
    ):
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        assert not exit.value.code
    arrays, loaded = load_file(tmp_path / "x.safetensors"), read_torch(tmp_path / "x.pth")
    assert loaded["version"] == "1.4.2"
    assert set(arrays) == set(loaded["model"])
    for name, value in loaded["model"].items():
        np.testing.assert_array_equal(arrays[name], value)
