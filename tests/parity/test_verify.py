"""`linnet verify` itself: it must see a wrong number, say what it did not check, and reject what it cannot read."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from linnet.convert.npz import read_npz, write_npz
from linnet.core.errors import UserError
from linnet.core.params import map_specs
from linnet.models.vq import family, model
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import NOT_THE_MODEL, config_from_reference, to_reference
from linnet.verify import Verification, render, verify_file
from linnet.verify.compare import compare

# Two heads, a window that is no multiple of the block, and a text shorter than the window.
CFG = VQConfig(
    n_vocab=11, d_model=8, d_k=4, d_v=6, n_head=2, n_code=5, n_layer=1, block_len=4, mem_len=6, pe_abs=True, e_tie=True
)
N_TOKEN = 5


def settings(cfg: VQConfig) -> dict[str, Any]:
    """As the reference writes them: 0 and 1 for switches, and none of the settings that only Linnet has."""
    ours = ("reset_at_documents", "restart_dead_codes", "dead_code_below", "remat")
    values = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in ours}
    return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}


@pytest.fixture(scope="module")
def forward() -> dict[str, np.ndarray]:
    """A forward file as the reference would write it, computed by the dense attention and written by hand."""
    generator = np.random.default_rng(0)
    draw = lambda spec: jax.numpy.asarray(generator.normal(size=spec.shape), jax.numpy.float32)  # noqa: E731
    params, buffers = (map_specs(draw, specs(CFG)) for specs in (family.param_specs, family.buffer_specs))
    tokens = generator.integers(0, CFG.n_vocab, (3, N_TOKEN)).astype(np.int32)
    x, _, aux = model.forward(
        params, buffers, jax.numpy.asarray(tokens), model.empty_carry(CFG, 3), CFG, dense=True, keep_outputs=True
    )
    window = np.full((3, CFG.n_head, CFG.mem_len), CFG.n_code, np.int32)
    window[:, :, -N_TOKEN:] = aux.codes[0]
    return {
        "meta": np.array(json.dumps({"family": "vq", "kind": "forward", "config": {**settings(CFG), "note": "x"}})),
        **{f"params/{name}": value for name, value in to_reference(params, buffers, CFG).items()},
        "in/inputs": tokens,
        "out/logprobs": np.asarray(jax.nn.log_softmax(model.logits(params, x, CFG))),
        "out/shortcodes": np.asarray(aux.codes),
        "out/state/0/0/xlcache/z": window,
        "out/state/0/0/aggcache/lower": np.zeros((3, CFG.n_head, CFG.n_code), np.float32),
        "out/state/0/0/pos_offset": np.asarray(N_TOKEN, np.int32),
    }


def write(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path / "file.npz", **arrays)
    return path / "file.npz"


def failed(result: Verification) -> list[str]:
    return [check.name for check in result.checks if not check.passed]


def with_meta(arrays: dict[str, np.ndarray], **changes: Any) -> dict[str, np.ndarray]:
    meta = json.loads(str(arrays["meta"]))
    config = {**meta["config"], **changes.pop("config", {})}
    return {**arrays, "meta": np.array(json.dumps({**meta, "config": config, **changes}))}


def test_two_heads_and_a_short_text_pass(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    result = verify_file(write(tmp_path, forward))
    assert failed(result) == []
    assert len(result.checks) == 5
    assert result.not_checked == ()
    assert result.notes == ()


def test_wrong_number_is_seen(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    wrong = {name: np.array(value) for name, value in forward.items()}
    wrong["out/logprobs"][1, 2, 3] += 3e-5 * np.abs(wrong["out/logprobs"]).max()
    wrong["out/shortcodes"][0, 0, 0, 0] ^= 1
    wrong["out/state/0/0/aggcache/lower"][0, 0, 0] = 1.0
    path = write(tmp_path, wrong)
    result = verify_file(path)
    assert failed(result) == ["logprobs", "shortcodes", "state/0/0/aggcache/lower"]
    assert not result.passed
    assert result.checks[0].error == pytest.approx(3e-5, rel=0.1)
    assert result.checks[0].note == "worst at (1, 2, 3)"
    assert failed(verify_file(path, tolerance=1e-4)) == ["shortcodes", "state/0/0/aggcache/lower"]


def test_unknown_outputs_and_settings_are_reported(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    more = {**with_meta(forward, config={"d_new": 3}), "out/mystery": np.zeros(3)}
    result = verify_file(write(tmp_path, more))
    assert result.passed
    assert [s.name for s in result.not_checked] == ["mystery"]
    assert "d_new" in result.notes[0]
    out = StringIO()
    Console(file=out, width=200).print(render(result))
    assert "not checked: mystery" in out.getvalue()
    assert "d_new" in out.getvalue()
    told = json.loads(json.dumps(result.to_json()))
    assert told["passed"] is True
    assert told["not_checked"] == [{"name": "mystery", "reason": "not an output that Linnet knows"}]
    assert told["tensors"][0].keys() >= {"name", "max_relative_error", "passed"}


def test_nothing_checked_is_not_a_pass(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    only = {name: value for name, value in forward.items() if not name.startswith("out/")}
    assert not verify_file(write(tmp_path, {**only, "out/mystery": np.zeros(3)})).passed


def test_render_shows_failures(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    wrong = {**forward, "out/logprobs": forward["out/logprobs"] * np.nan}
    out = StringIO()
    result = verify_file(write(tmp_path, wrong))
    Console(file=out, width=200).print(render(result))
    assert "FAILED, 1 of 6" in " ".join(out.getvalue().split())
    assert json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a: {k: v for k, v in a.items() if k != "meta"}, "no 'meta'"),
        (lambda a: {**a, "meta": np.array("{")}, "not JSON"),
        (lambda a: {**a, "meta": np.array("[]")}, "no 'config'"),
        (lambda a: with_meta(a, family="moe"), "family"),
        (lambda a: with_meta(a, kind="guess"), "kind"),
        (lambda a: with_meta(a, kind="decode", config={"d_k": 5}), "shape of"),
        (lambda a: with_meta(a, kind="grads"), "in/targets"),
        (lambda a: with_meta(a, kind="carry"), "out/logprobs_1"),
        (lambda a: with_meta(a, kind="sample"), "out/greedy_tokens"),
        (lambda a: with_meta(a, kind="schedule"), "out/steps"),
        (lambda a: with_meta(a, config={"e_tie": 2}), "e_tie"),
        (lambda a: {k: v for k, v in a.items() if k != "in/inputs"}, "in/inputs"),
        (lambda a: {**a, "in/inputs": a["in/inputs"][0]}, "B x T"),
        (lambda a: {k: v for k, v in a.items() if k != "params/token_embedder/embs"}, "token_embedder/embs"),
        (lambda a: {k: v for k, v in a.items() if not k.startswith("out/")}, "nothing to check"),
        (lambda a: {**a, "stray": np.zeros(2)}, "'stray'"),
    ],
)
def test_wrong_files_are_rejected(tmp_path: Path, forward: dict[str, np.ndarray], change: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        verify_file(write(tmp_path, change(forward)))


def test_missing_and_corrupt_files_are_rejected(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        verify_file(tmp_path / "none.npz")
    with pytest.raises(UserError, match="folder"):
        verify_file(tmp_path)
    path = write(tmp_path, forward)
    complete = path.read_bytes()
    for cut in (10, len(complete) // 2, len(complete) - 30):
        path.write_bytes(complete[:cut])
        with pytest.raises(UserError, match=r"file\.npz"):
            verify_file(path)
    np.savez(path, meta=np.array([object()]), allow_pickle=True)
    with pytest.raises(UserError, match="pickled"):
        verify_file(path)


def test_comparison() -> None:
    one = np.array([1.0, -4.0], np.float32)
    assert compare("x", one + np.float32(4e-5), one, 1.1e-5).passed
    assert not compare("x", one + np.float32(6e-5), one, 1e-5).passed
    assert not compare("x", one[:1], one, 1e-5).passed
    assert not compare("x", one * np.nan, one, 1e-5).passed
    assert compare("x", np.array([-np.inf]), np.array([-np.inf]), 1e-5).passed
    assert compare("x", np.full(2, 1e-7), np.zeros(2), 1e-5).passed
    assert not compare("x", np.full(2, 2e-6), np.zeros(2), 1e-5).passed
    assert not compare("x", np.array([1, 2]), np.array([1, 3]), 1e-5).passed
    assert compare("x", 0.001, np.asarray(0.00100001, np.float32), 1e-6, scale=0.5).passed


def test_config_from_reference() -> None:
    values = settings(CFG)
    extra = dict.fromkeys(NOT_THE_MODEL, 0) | {"param_dtype": "float32"}
    assert config_from_reference({**values, **extra, "pe_lam": 100000}) == CFG
    with pytest.raises(UserError, match="d_new"):
        config_from_reference({**values, "d_new": 1})
    with pytest.raises(UserError, match="mem_len"):
        config_from_reference({name: value for name, value in values.items() if name != "mem_len"})
    with pytest.raises(UserError, match="param_dtype"):
        config_from_reference({**values, "param_dtype": "bfloat16"})
    with pytest.raises(UserError, match="n_head"):
        config_from_reference({**values, "n_head": "two"})
    with pytest.raises(UserError, match="dtype"):
        config_from_reference({**values, "dtype": "float8"})


def test_optimizer_settings_are_checked(tmp_path: Path, forward: dict[str, np.ndarray]) -> None:
    batch = {f"in/batch1/{name}": forward["in/inputs"][:, :4] for name in ("inputs", "targets")}
    good = {"optimizer": "lion", "lr_max": 0.1, "lr_schedule": "linear", "n_warmup_step": 0, "n_max_step": 2}
    for wrong, told in (({"optimizer": "sgd"}, "sgd"), ({"new": 1}, "new"), ({"lr_max": "high"}, "lr")):
        config = {"update_len": 4, "opt": {**good, **wrong}}
        with pytest.raises(UserError, match=told):
            verify_file(write(tmp_path, {**with_meta(forward, kind="train", config=config), **batch}))
    with pytest.raises(UserError, match="opt"):
        verify_file(write(tmp_path, {**with_meta(forward, kind="train", config={"update_len": 4}), **batch}))


def test_file_whose_values_contradict_each_other_is_one_sentence(tmp_path: Path) -> None:
    arrays = read_npz(Path(__file__).parents[1] / "goldens" / "prior" / "ema_scalar.npz")
    name = next(name for name in arrays if name.endswith("/cfg"))
    write_npz(tmp_path / "a.npz", arrays | {name: np.array('{"beta": [')})
    with pytest.raises(UserError, match=r"a.npz cannot be recomputed: its values do not fit together .*Fix: "):
        verify_file(tmp_path / "a.npz")
