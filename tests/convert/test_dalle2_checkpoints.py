"""Checkpoints of the reference's prior: every layout is read, its numbers are the file's, and nothing in a file is ever run."""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_prior import config, model
from torch_files import Writer

from linnet.convert.dalle2.prior import _read_metadata, find_states, read_prior_checkpoint
from linnet.convert.torch_pickle import Inert, read_torch
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import to_reference
from linnet.models.prior.network import network
from linnet.models.prior.params import PriorParams
from linnet.models.prior.reference import infer_config
from linnet.models.prior.releases import behaviour, recognize
from linnet.models.prior.schedule import betas

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "prior" / "ckpt"


def test_references_own_checkpoints_are_read_and_predict_what_it_predicted() -> None:
    expected = np.load(CHECKPOINTS / "nowarmup_expected.npz")
    trained = read_prior_checkpoint(CHECKPOINTS / "nowarmup_checkpoint.pth")
    bare = read_prior_checkpoint(CHECKPOINTS / "nowarmup_model.pth")
    assert (trained.which, bare.which, bare.other) == ("ema", "ema", None)
    assert trained.facts == {
        "step": 3,
        "epoch": 1,
        "samples_seen": 12,
        "best_validation_loss": 0.25,
        "version": "1.15.6",
    }
    for imported, params, kind in (
        (trained, trained.params, "ema_model"),
        (trained, trained.other, "model"),
        (bare, bare.params, "ema_model"),  # the reference saves its average as the model
    ):
        assert params is not None
        for name, value in to_reference(params, imported.cfg).items():
            np.testing.assert_array_equal(value, expected[f"{kind}/net.{name}"], err_msg=name)
    x, t, text, enc = (jnp.asarray(expected[f"in/{name}"]) for name in ("x", "t", "te", "enc"))
    run = jax.jit(lambda p: network(p, x, t, text, enc, None, None, None, trained.cfg))
    for name, params in (("out/ema", trained.params), ("out/model", trained.other)):
        np.testing.assert_allclose(run(params), expected[name], atol=1e-5 * np.abs(expected[name]).max())


@pytest.mark.parametrize("release", ["1.15.6", "1.1.0"])
def test_checkpoints_saved_during_warm_up_are_read_to_the_bit(release: str) -> None:
    """The pickled LinearWarmup and its optimizer stay inert; online and averaged weights are the file's."""
    expected = np.load(CHECKPOINTS / f"warmup_{release}_expected.npz")
    for file in ("checkpoint", "model"):
        path = CHECKPOINTS / f"warmup_{release}_{file}.pth"
        states = find_states(read_torch(path), path)
        assert set(states) == ({"ema", "online"} if file == "checkpoint" else {"ema"})
        for which, state in states.items():
            prefix = {"ema": "ema_model/", "online": "model/"}[which]
            names = [name for name in expected.files if name.startswith(prefix)]
            assert {name.removeprefix(prefix) for name in names} == set(state)
            for name in names:
                np.testing.assert_array_equal(state[name.removeprefix(prefix)], expected[name], err_msg=name)
    imported = read_prior_checkpoint(CHECKPOINTS / f"warmup_{release}_checkpoint.pth")
    assert (imported.facts["version"], imported.facts["step"]) == (release, 5)
    x, t, text, enc = (jnp.asarray(expected[f"in/{name}"]) for name in ("x", "t", "te", "enc"))
    run = jax.jit(lambda p: network(p, x, t, text, enc, None, None, None, imported.cfg))
    for name, params in (("out/ema", imported.params), ("out/model", imported.other)):
        np.testing.assert_allclose(run(params), expected[name], atol=1e-5 * np.abs(expected[name]).max())


def test_bare_state_dict_is_read_to_the_bit() -> None:
    path = CHECKPOINTS / "bare_0.22.1_model.pth"
    golden = np.load(CHECKPOINTS.parent / "legacy_0.22.1.npz")
    (state,) = find_states(read_torch(path), path).values()
    names = [name.removeprefix("params/") for name in golden.files if name.startswith("params/")]
    assert names
    for name in names:
        np.testing.assert_array_equal(state[name], golden[f"params/{name}"], err_msg=name)


@pytest.mark.slow
def test_warm_up_and_bare_checkpoints_predict_what_the_reference_predicted() -> None:
    def check(found: PriorParams, cfg: PriorConfig, inputs: list[np.ndarray], expected: np.ndarray) -> None:
        image, times, text, encodings = map(jnp.asarray, inputs)
        output = network(found, image, times, text, encodings, None, None, None, cfg)
        np.testing.assert_allclose(output, expected, atol=1e-5 * np.abs(expected).max())

    for release in ("1.15.6", "1.1.0"):
        golden = np.load(CHECKPOINTS / f"warmup_{release}_expected.npz")
        imported = read_prior_checkpoint(CHECKPOINTS / f"warmup_{release}_checkpoint.pth", {"text_encodings": True})
        inputs = [golden[f"in/{name}"] for name in ("x", "t", "te", "enc")]
        assert imported.other is not None
        check(imported.params, imported.cfg, inputs, golden["out/ema"])
        check(imported.other, imported.cfg, inputs, golden["out/model"])
    golden = np.load(CHECKPOINTS.parent / "legacy_0.22.1.npz")
    imported = read_prior_checkpoint(CHECKPOINTS / "bare_0.22.1_model.pth", {"text_encodings": True})
    inputs = [golden[f"in/{name}"] for name in ("x", "t", "text_embed", "text_encodings")]
    check(imported.params, imported.cfg, inputs, golden["out/enc"])


def test_versions_are_read_however_they_were_stored() -> None:
    """As a string (0.6 .. 0.9), and as the objects that several releases of packaging pickle."""
    numbers = (0, (1, 0, 1), None, None, None, None)
    fields = Inert("packaging.version", "_Version", numbers)
    for stored in (
        "1.0.1",
        Inert("packaging.version", "Version", (), numbers),
        Inert("packaging.version", "Version", (), {"_version": fields, "_key": (0, (1, 0, 1))}),
        Inert("packaging.version", "Version", (), (None, {"_epoch": 0, "_release": (1, 0, 1)})),
    ):
        assert _read_metadata({"version": stored}) == {"version": "1.0.1"}
    for odd in ("\x1b[2J", "1." + "9" * 500, (1, 10**40), None, np.ones(3)):
        assert _read_metadata({"version": odd, "step": float("nan"), "epoch": 10**400}) == {}


def test_schedule_tables_at_the_top_of_older_state_dicts_are_found(tmp_path: Path) -> None:
    cfg = config(**behaviour("0.6.2"), max_text_len=0, text_encodings=False, timesteps=12, schedule="linear")
    state = {f"net.{k}": v for k, v in to_reference(model(cfg), cfg).items()}
    renamed = {k.removesuffix(".g") + ".gamma" if k.endswith(".g") else k: v for k, v in state.items()}
    layout = {"model": {**renamed, "betas": betas("linear", 12)}, "scaler": {}, "version": "0.6.2", "step": 3}
    found = read_prior_checkpoint(Writer().save(tmp_path / "old.pth", {**layout, "optimizer": {}}))
    assert (found.cfg, found.which, found.facts) == (cfg, "online", {"version": "0.6.2", "step": 3})


def test_every_layout_gives_the_same_model(tmp_path: Path) -> None:
    cfg = config(normformer=True, n_text_token=2, timesteps=12, schedule="linear", text_encodings=False)
    params = {"online": model(cfg, 1), "ema": model(cfg, 2)}
    state = {
        name: {**{f"net.{k}": v for k, v in to_reference(p, cfg).items()}, "noise_scheduler.betas": betas("linear", 12)}
        for name, p in params.items()
    }
    average = {
        f"{a}.{k}": v for a, b in (("ema_model", "ema"), ("online_model", "online")) for k, v in state[b].items()
    }
    layouts = {
        "trainer": ({"model": state["online"], "ema_model": state["ema"], "step": 7}, "ema"),
        "old trainer": ({"model": state["online"], "ema": average}, "ema"),
        "average": ({"initted": np.ones(1), **average}, "ema"),
        "model": ({"model": state["ema"]}, "ema"),
        "state": (state["online"], "online"),
    }
    for name, (layout, which) in layouts.items():
        found = read_prior_checkpoint(Writer().save(tmp_path / f"{name}.pth", layout))
        assert found.which == which, name
        assert found.cfg == config(
            normformer=True, n_text_token=2, timesteps=12, schedule="linear", text_encodings=False
        ), name
        for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(params[which]), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    requested = read_prior_checkpoint(tmp_path / "trainer.pth", which="online")
    assert (requested.which, requested.facts) == ("online", {"step": 7})
    assert requested.other is not None


def test_older_names_tell_the_release(tmp_path: Path) -> None:
    old = config(**behaviour("0.15.4"), max_text_len=0, text_encodings=False)
    state = to_reference(model(old), old)
    renamed = {k.removesuffix(".g") + ".gamma" if k.endswith(".g") else k: v for k, v in state.items()}
    shifts = {k.removesuffix("gamma") + "beta": np.zeros_like(v) for k, v in renamed.items() if k.endswith(".gamma")}
    found = read_prior_checkpoint(Writer().save(tmp_path / "old.pth", {**renamed, **shifts}))
    assert (found.cfg, found.release.family) == (old, "A")
    middle = config(**behaviour("1.1.0"), text_encodings=False)
    state = to_reference(model(middle), middle)
    assert "null_text_embed" in state
    found = read_prior_checkpoint(Writer().save(tmp_path / "middle.pth", state))
    assert (found.cfg, found.release.family) == (middle, "C1")


def test_settings_may_add_to_the_weights_and_not_contradict_them() -> None:
    cfg = config(text_encodings=False)
    state = to_reference(model(cfg), cfg)
    release = recognize(state)
    assert infer_config(state, None, {"objective": "v", "self_cond": True}, release).objective == "v"
    with pytest.raises(UserError, match=r"model\.depth"):
        infer_config(state, None, {"depth": 9}, release)
    with pytest.raises(UserError, match="noise schedule"):
        infer_config(state, np.linspace(0.1, 0.9, 40), {}, release)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00echotR", "os.system"),
        (b"c__builtin__\neval\n(X\x01\x00\x00\x001tR", "eval"),
        (b"ctorch\ndevice\n(X\x01\x00\x00\x001tRK\x01b", None),
        (b"K\x01K\x02K\x03s", "not a table"),
        (b"(K\x01", "mark|remains after the end"),
        (b"h\x07", "did not store"),
        (b"i\x00", "not an opcode"),
    ],
    ids=["system", "eval", "inert", "items", "mark", "memo", "opcode"],
)
def test_no_code_in_a_file_is_executed(tmp_path: Path, value: bytes, why: str | None) -> None:
    path = Writer().save(tmp_path / "x.pth", value)
    if why is None:
        assert read_torch(path).name == "device"
        return
    with pytest.raises(UserError, match=why):
        read_torch(path)


def test_python_pickle_is_rejected_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4):
        data = pickle.dumps({"model": Evil(), "o": collections.OrderedDict(a=1)}, protocol)
        with zipfile.ZipFile("evil.pth", "w") as archive:
            archive.writestr("archive/data.pkl", data)
        with pytest.raises(UserError, match="system"):
            read_torch(Path("evil.pth"))
    assert not Path("pwned").exists()
    Path("plain.pth").write_bytes(pickle.dumps([1]))
    with pytest.raises(UserError, match=r"torch 1\.6"):
        read_torch(Path("plain.pth"))


def test_tensors_are_read_by_their_strides_and_never_beyond_their_bytes(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32)
    turned = Writer()
    turned.tensor(x, (4, 3), (1, 4))
    np.testing.assert_array_equal(read_torch(turned.save(tmp_path / "t.pth")), x.reshape(3, 4).T)
    for shape, strides, offset in (((4, 4), (4, 1), 0), ((4, 3), (3, 1), 1), ((3,), (-1,), 0), ((13,), (0,), 0)):
        bad = Writer()
        bad.tensor(x, shape, strides, offset)
        with pytest.raises(UserError, match="tensor"):
            read_torch(bad.save(tmp_path / "bad.pth"))


def test_corrupt_and_foreign_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compressed"):
        read_torch(Writer().save(tmp_path / "a.pth", {"a": 1}, zipfile.ZIP_DEFLATED))
    with pytest.raises(UserError, match="no weights of a diffusion prior"):
        read_prior_checkpoint(Writer().save(tmp_path / "b.pth", {"model": {"a": np.zeros(3)}}))
    with pytest.raises(UserError, match="does not exist|cannot be read"):
        read_torch(tmp_path / "none.pth")
    cfg = config(text_encodings=False)
    state = to_reference(model(cfg), cfg)
    state["learned_query"] = state["learned_query"] * np.nan
    with pytest.raises(UserError, match="not finite"):
        read_prior_checkpoint(Writer().save(tmp_path / "nan.pth", state))
    full = Writer().save(tmp_path / "c.pth", {"a": np.zeros(30)}).read_bytes()
    (tmp_path / "cut.pth").write_bytes(full[: len(full) // 2])
    with pytest.raises(UserError):
        read_torch(tmp_path / "cut.pth")
