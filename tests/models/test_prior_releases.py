"""Releases of the reference's prior: each behaves as its family, and a checkpoint is recognized by version, names and keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_prior import config, model
from torch_files import Writer

from linnet.cli import main
from linnet.config import codec
from linnet.config import schema as configs
from linnet.config.schema import RunConfig
from linnet.convert.dalle2.prior import read_prior_checkpoint
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import to_reference
from linnet.models.prior.releases import behaviour, family_of, parse, recognize
from linnet.models.prior.sampling import check_guidance, effective_guidance, guidance_remark
from linnet.models.prior.tokens import sinusoid, truncated

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "prior" / "ckpt"
B, C, E = ["learned_query", "a.g"], ["null_text_embed", "a.g"], ["null_text_encodings", "a.g"]
EDGES = {
    "A": ("0.4.0", "0.15.4"),
    "B0": ("0.16.0", "0.16.0"),
    "B1": ("0.16.1", "0.16.1"),
    "B2": ("0.16.2", "0.22.3"),
    "C0": ("0.23.0", "0.23.2"),
    "C1": ("0.23.3", "1.4.2"),
    "D": ("1.4.3", "1.8.4"),
    "E": ("1.9.0", "1.10.3"),
    "F": ("1.10.4", "1.15.6"),
}


def test_families_begin_and_end_where_the_network_changed() -> None:
    for family, versions in EDGES.items():
        assert [family_of(version) for version in versions] == [family, family]
    assert (family_of("0.3.9"), family_of("2.0")) == ("A", "F")
    assert parse("1.10.3") > parse("1.9.0")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.15.4", ("product", 1.0, "plain", "plain", "mask")),
        ("0.16.0", ("product", 1.0, "plain", "plain", "mask")),
        ("0.16.1", ("product", 1024.0, "plain", "plain", "mask")),
        ("0.22.3", ("product", 1024.0, "maximum", "maximum", "mask")),
        ("0.23.2", ("product", 1024.0, "maximum", "maximum", "learned_padding")),
        ("1.4.2", ("product", 128.0, "plain", "maximum", "learned_padding")),
        ("1.8.4", ("cosine", 1.0, "plain", "maximum", "learned_padding")),
        ("1.10.3", ("cosine", 1.0, "plain", "maximum", "null_vectors")),
        ("1.15.6", ("cosine", 1.0, "plain", "maximum", "null_vectors")),
    ],
)
def test_release_is_part_of_the_model_config(version: str, expected: tuple[Any, ...]) -> None:
    cfg = PriorConfig(**behaviour(version))
    assert (cfg.scores, cfg.bias_scale, cfg.norms, cfg.last_norm, cfg.text_conditioning) == expected


def test_changes_within_families_of_releases() -> None:
    def field(name: str, *versions: str) -> list[Any]:
        return [getattr(PriorConfig(**behaviour(version)), name) for version in versions]

    assert field("truncated_time", "0.16.8", "0.16.9", "1.10.7", "1.10.8") == [False, True, True, False]
    assert field("text_mask", "0.21.0", "0.21.1", "0.22.0", "0.22.3") == ["given", "given_or_nonzero", "nonzero", "all"]
    assert field("drop_text_embedding", "1.8.4", "1.9.0", "1.10.3", "1.10.4") == [True, False, False, True]
    layouts = ["last_zeros", "last", "last", "before_query"]
    assert field("self_cond_layout", "1.6.1", "1.6.2", "1.12.0", "1.12.1") == layouts
    assert PriorConfig(**behaviour("1.15.6")) == PriorConfig()


def test_without_a_version_names_and_keys_decide() -> None:
    def found(names: list[str], *keys: str) -> str:
        return recognize(names, keys=keys).family

    assert found(["x.gamma", "x.beta"]) == "A"
    assert found(B) == "B2"
    assert found(C) == found(C, "scaler", "optimizer") == "C1"
    assert found(C, "warmup_scheduler", "scheduler") == "D"
    assert found(E) == "F"
    with pytest.raises(UserError, match=r"1\.0\.1 to 1\.8\.0.*--release 1\.4\.2"):
        found(C, "warmup_scheduler", "optimizer")


def test_saved_version_decides_and_may_be_overridden_but_not_against_the_names() -> None:
    assert recognize(B, version="0.16.1").family == "B1"
    assert recognize(C, version="1.4.3").family == "D"
    assert recognize(C, version="1.4.3", override="0.23.1").family == "C0"
    assert recognize(C, keys=["warmup_scheduler"], override="1.4.2").family == "C1"
    for names, version in ((C, "1.15.6"), (E, "1.4.2"), (B, "0.15.4"), (["x.gamma"], "0.16.0")):
        with pytest.raises(UserError, match="names of the weights"):
            recognize(names, version=version)
    with pytest.raises(UserError, match="--release"):
        recognize(C, version="newest")


def saved(path: Path, version: str | None, **options: Any) -> Path:
    cfg = config(**behaviour(version or "1.15.6"), depth=1, text_encodings=False, timesteps=12, **options)
    state = {f"net.{name}": value for name, value in to_reference(model(cfg), cfg).items()}
    return Writer().save(path, {"model": state, **({} if version is None else {"version": version})})


def test_ambiguous_checkpoints_are_rejected_until_a_release_is_given(tmp_path: Path) -> None:
    timeless, plain = saved(tmp_path / "a.pth", None, continuous_time=True), saved(tmp_path / "b.pth", None)
    with pytest.raises(UserError, match=r"time is continuous.*--release 1\.10\.7 or --release 1\.15\.6"):
        read_prior_checkpoint(timeless)
    assert read_prior_checkpoint(timeless, release="1.10.7").cfg.truncated_time
    with pytest.raises(UserError, match="self-conditioned"):
        read_prior_checkpoint(plain, {"self_cond": True})
    assert read_prior_checkpoint(plain, {"self_cond": True}, release="1.12.0").cfg.self_cond_layout == "last"
    assert read_prior_checkpoint(plain).release.version == "1.15.6"


def test_settings_that_a_release_did_not_have_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no self-conditioning"):
        read_prior_checkpoint(saved(tmp_path / "a.pth", "1.6.0"), {"self_cond": True})
    path = saved(tmp_path / "b.pth", "1.11.0")
    with pytest.raises(UserError, match="wrong sign"):
        read_prior_checkpoint(path, {"objective": "v"})
    assert read_prior_checkpoint(path, {"objective": "noise"}).release.version == "1.11.0"


def test_references_files_are_recognized() -> None:
    def release(name: str) -> tuple[str, str]:
        found = read_prior_checkpoint(CHECKPOINTS / name).release
        return found.version, found.family

    assert release("bare_0.22.1_model.pth") == ("0.22.1", "B2")
    assert release("warmup_1.1.0_model.pth") == ("1.1.0", "C1")
    assert release("nowarmup_checkpoint.pth") == ("1.15.6", "F")


def linnet(*arguments: str | Path) -> Any:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code


def test_command_reports_the_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = CHECKPOINTS / "warmup_1.1.0_model.pth"
    assert not linnet("import", "dalle2-prior", file, "--out", tmp_path / "run")
    output = capsys.readouterr().out
    assert (
        "Network of DALLE2-pytorch 1.1.0, family C1 (saved in the file): product scores, position bias times 128"
        in output
    )
    assert "guidance has no effect" in output
    assert codec.load(tmp_path / "run" / "config.json").prior.bias_scale == 128.0
    assert not linnet("import", "dalle2-prior", file, "--out", tmp_path / "other", "--release", "1.8.0")
    assert "family D (--release): cosine scores" in capsys.readouterr().out
    assert linnet("import", "dalle2-prior", file, "--out", tmp_path / "none", "--release", "1.15.6") == 2
    assert "0.23.0 or later and before 1.9.0" in capsys.readouterr().err
    assert linnet("import", "grok-1", file, "--out", tmp_path / "none", "--release", "1.15.6") == 2
    assert "--release" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("release", "same"),
    [
        ("1.15", {}),
        ("1.6", {"text_conditioning": "learned_padding"}),
        ("0.15", {"text_conditioning": "mask", "scores": "product", "last_norm": "plain"}),
    ],
)
def test_configs_that_name_one_of_three_releases_still_load(release: str, same: dict[str, Any], tmp_path: Path) -> None:
    old = codec.to_json(RunConfig(family="prior", model=PriorConfig(), data=configs.PairsConfig()))
    new = ("scores", "bias_scale", "norms", "last_norm", "text_conditioning", "drop_text_embedding", "text_mask")
    for name in (*new, "self_cond_layout", "truncated_time"):
        del old["model"][name]
    old["model"]["release"] = release
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert codec.load(tmp_path / "config.json").prior == PriorConfig(**same)
    old["model"]["release"] = "1.4"
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"model\.release"):
        codec.load(tmp_path / "config.json")


def test_guidance_of_a_model_without_text_dropout_is_none_and_reported() -> None:
    padded, now = config(**behaviour("1.1.0")), config()
    check_guidance(3.0, padded)
    assert (effective_guidance(3.0, padded), effective_guidance(3.0, now)) == (1.0, 3.0)
    assert "unguided" in (guidance_remark(3.0, padded) or "")
    assert guidance_remark(1.0, padded) is None
    assert guidance_remark(3.0, now) is None
    with pytest.raises(UserError, match="p_drop_text"):
        check_guidance(3.0, config(p_drop_text=0.0))


def test_exports_have_the_names_of_their_release() -> None:
    cfg = config(**behaviour("1.1.0"))
    state = to_reference(model(cfg), cfg)
    assert recognize(state).family == "C1"
    assert np.shape(state["null_text_embed"]) == (1, cfg.max_text_len, cfg.dim)


def test_truncated_times_are_those_of_the_reference() -> None:
    """As torch 2.13 computes them at the width of CLIP's embeddings: 565 of 768,000 are not 0, most of them at times 0 and 1."""
    waves = np.asarray(truncated(sinusoid(jnp.arange(1000), 768)))
    assert set(np.unique(waves)) == {-1.0, 0.0, 1.0}
    per_time = np.abs(waves).sum(axis=1)
    assert (per_time.sum(), per_time[:4].tolist()) == (565, [384, 41, 13, 0])
    assert waves[979, 421] != 0
    assert waves[355, 384] == -1  # 355 is 113 pi nearly
