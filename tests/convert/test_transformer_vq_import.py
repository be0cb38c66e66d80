"""Checkpoints of the official Transformer-VQ: imported, evaluated, sampled, trained on and exported from the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import config, corpus

from linnet.cli.convert import export_command, import_command
from linnet.cli.evaluate import eval_command
from linnet.cli.sample import sample_command
from linnet.config import codec
from linnet.config.schema import OptimConfig, RunConfig
from linnet.convert.flax import flatten, nest, pack_flax, read_flax, write_flax
from linnet.convert.transformer_vq import find_newest_checkpoint
from linnet.convert.transformer_vq_optim import UnsupportedOptimizer, from_opt_state, read_optimizer, to_opt_state
from linnet.core.errors import UserError
from linnet.core.params import map_specs
from linnet.core.pytree import named_leaves
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import leaves_from_reference, params_from_leaves, to_reference
from linnet.models.vq.params import buffer_specs, param_specs
from linnet.optim.optimizer import optimizer
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_state
from linnet.train.loop import train

OFFICIAL = Path(__file__).parent.parent / "goldens" / "vq" / "official"
LENGTHS = ["--block-len", "32", "--mem-len", "32", "--sequence-len", "512", "--update-len", "256"]
EXPECTED = json.loads((OFFICIAL / "official.json").read_text())
TINY = VQConfig(n_vocab=11, d_model=8, d_k=4, d_v=6, n_head=2, n_code=5, n_layer=1, block_len=4, mem_len=6)
TIED = VQConfig(
    n_vocab=130, d_model=132, d_k=4, d_v=6, n_code=5, n_layer=1, block_len=4, mem_len=6, pe_abs=True, e_tie=True
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("official") / "run"
    assert import_command(["transformer-vq", str(OFFICIAL), *LENGTHS, "--out", str(out)]) == 0
    return out


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_official_loss_on_heldout_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    eval_command([str(run), "--source", str(OFFICIAL / EXPECTED["heldout"]), "--json"])
    record = printed(capsys)
    assert abs(record["nats_per_byte"] - EXPECTED["loss_nats_per_byte"]) < 1e-6
    assert (record["step"], record["sequence_len"]) == (EXPECTED["updates"], EXPECTED["sequence_len"])


def test_eval_takes_other_lengths(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ["--source", str(OFFICIAL / EXPECTED["heldout"]), "--json"]
    losses = {}
    for length in (64, 512):
        capsys.readouterr()
        eval_command([str(run), *source, "--sequence-len", str(length), "--update-len", "64"])
        losses[length] = printed(capsys)["loss"]
    assert abs(losses[512] - EXPECTED["loss_nats_per_byte"]) < 1e-6
    assert losses[64] > losses[512] + 0.01
    with pytest.raises(UserError, match="multiple of data.update_len"):
        eval_command([str(run), *source, "--sequence-len", "100", "--update-len", "64"])
    with pytest.raises(UserError, match="--sequence-len is 0"):
        eval_command([str(run), *source, "--sequence-len", "0"])


@pytest.mark.parametrize("number", [0, 2])  # `verify` reads all of them
def test_official_greedy_continuations(run: Path, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = EXPECTED["continuations"][number]
    capsys.readouterr()
    flags = [
        "--prompt",
        wanted["prompt"],
        "--max-tokens",
        str(wanted["n"]),
        "--temperature",
        "0",
        "--ignore-end",
        "--json",
    ]
    sample_command([str(run), *flags])
    assert printed(capsys)["samples"][0]["text"] == wanted["prompt"] + wanted["bytes"]


def test_export_repeats_the_official_file_byte_for_byte(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "checkpoint_30"
    assert export_command([str(run), "--format", "transformer-vq", "--out", str(out)]) == 0
    assert out.read_bytes() == (OFFICIAL / "checkpoint_30").read_bytes()
    again = tmp_path / "again"  # the settings beside the file are found
    assert import_command(["transformer-vq", str(out.parent), "--out", str(again)]) == 0
    assert (again / "config.json").read_text() == (run / "config.json").read_text()
    assert export_command([str(again), "--format", "transformer-vq", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "checkpoint_30").read_bytes() == out.read_bytes()


def test_npz_is_still_written(run: Path, tmp_path: Path) -> None:
    for out, flag in (("a.npz", "transformer-vq"), ("b", "transformer-vq-npz")):
        export_command([str(run), "--format", flag, "--out", str(tmp_path / out)])
        with np.load(tmp_path / out) as file:
            assert {"meta", "token_embedder/embs"} <= set(file.files)
    import_command(["transformer-vq", str(tmp_path / "a.npz"), "--out", str(tmp_path / "run")])
    _, state, step = open_state(tmp_path / "run", "latest")
    assert step == int(state.step) == 0  # weights alone


def test_newest_checkpoint_by_number(tmp_path: Path) -> None:
    for name in ("checkpoint_9", "checkpoint_100", "checkpoint_20", "checkpoint_100.tmp", "validation_loss_3"):
        (tmp_path / name).write_bytes(b"")
    assert find_newest_checkpoint(tmp_path).name == "checkpoint_100"
    (tmp_path / "checkpoint_101").mkdir()
    with pytest.raises(UserError, match="Orbax"):
        find_newest_checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="without a checkpoint_N"):
        find_newest_checkpoint(tmp_path / "empty")


def test_lengths_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    start = ["transformer-vq", str(OFFICIAL), "--block-len", "32", "--mem-len", "32", "--out", str(tmp_path / "run")]
    for flags, words in (
        (["--sequence-len", "100"], "--sequence-len is 100"),
        (["--update-len", "48"], "--update-len is 48"),
        (["--sequence-len", "512", "--update-len", "96"], "--sequence-len is 512"),
        (["--update-len", "-32"], "--update-len is -32"),
    ):
        with pytest.raises(UserError, match=words):
            import_command([*start, *flags])
    assert not (tmp_path / "run").exists()
    for flag in ("--sequence-len", "--update-len", "--optim.steps"):
        with pytest.raises(UserError, match=f"{flag} is 32, but it must be left out"):
            import_command(["grok-1", str(OFFICIAL), "--out", str(tmp_path / "run"), flag, "32"])
    bare = ["transformer-vq", str(OFFICIAL), "--out", str(tmp_path / "run")]
    with pytest.raises(UserError, match="--block-len N --mem-len N"):
        import_command(bare)


def test_settings_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**EXPECTED["args"], "optimizer": "adamw", "lr_max": 0.003, "lr_schedule": "linear", "grad_clip": 0.5}
    settings |= {"n_warmup_step": 5, "n_max_step": 60, "n_extra_step": 0, "wd_lam": 0.0, "command": "train"}
    path = tmp_path / "args.json"
    path.write_text(json.dumps(settings))
    start = ["transformer-vq", str(OFFICIAL), "--out"]
    import_command([*start, str(tmp_path / "run"), "--settings", str(path), "--optim.lr", "0.002"])
    assert "Assumed" not in capsys.readouterr().out
    cfg, state, step = open_state(tmp_path / "run", "latest")
    assert cfg.optim == OptimConfig(lr=0.002, schedule="linear", clip=0.5, warmup_steps=5, steps=60)
    assert (cfg.tokens.sequence_len, cfg.tokens.update_len, cfg.data.batch_size, step) == (512, 256, 4, 30)
    assert int(state.opt_state[2].count) == int(state.opt_state[1].count) == 30
    import_command([*start, str(tmp_path / "fresh"), "--settings", str(path), "--optimizer", "fresh"])
    assert open_state(tmp_path / "fresh", "latest")[2] == 0
    path.write_text(json.dumps({**settings, "optimizer": "lion"}))
    with pytest.raises(UserError, match="whose state the checkpoint holds"):
        import_command([*start, str(tmp_path / "other"), "--settings", str(path)])
    for text, words in (("{", "not JSON"), ("[1]", "object"), (json.dumps({**settings, "d_new": 1}), "d_new")):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            import_command([*start, str(tmp_path / "other"), "--settings", str(path)])


# The optimizer state.


def _is_decayed(params: Any) -> dict[str, bool]:
    return {name: jnp.ndim(value) != 1 for name, value in params.items()}


def official_chain(name: str, clip: bool, decay: bool) -> optax.GradientTransformation:
    """The official optimizer of the parameters, written down independently of the converter."""
    rule = {
        "adamw": lambda: optax.adamw(1e-3, b1=0.9, b2=0.98, eps=1e-9, mu_dtype=jnp.float32, weight_decay=0.0),
        "lion": lambda: optax.lion(1e-3, b1=0.95, b2=0.98, mu_dtype=jnp.bfloat16, weight_decay=0.0),
        "adafactor": lambda: optax.adafactor(1e-2, weight_decay_rate=0.0),
    }[name]()
    masked = optax.add_decayed_weights(-0.1, mask=_is_decayed)
    parts = [optax.clip_by_global_norm(0.1)] * clip + [rule, optax.scale_by_schedule(lambda _: 1.0)] + [masked] * decay
    return optax.chain(*parts)


def as_saved(state: Any, codebooks: dict[str, Any]) -> Any:
    """As Flax saves a state: tuples by number, named tuples by name; parameters nested, codebooks empty."""
    if hasattr(state, "_asdict"):
        return {name: as_saved(value, codebooks) for name, value in state._asdict().items()}
    if isinstance(state, tuple):
        return {str(i): as_saved(value, codebooks) for i, value in enumerate(state)}
    if isinstance(state, dict):
        return nest({**{name: np.asarray(value) for name, value in state.items()}, **codebooks})
    return np.asarray(state)


def official_file(cfg: VQConfig, name: str, clip: bool, decay: bool, n_update: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    draw = lambda spec: jnp.asarray(generator.normal(size=spec.shape), jnp.float32)  # noqa: E731
    flat = to_reference(map_specs(draw, param_specs(cfg)), map_specs(draw, buffer_specs(cfg)), cfg)
    main = {key: jnp.asarray(value) for key, value in flat.items() if "/c_" not in key}
    chain = official_chain(name, clip, decay)
    state, update = jax.jit(chain.init)(main), jax.jit(chain.update)
    for _ in range(n_update):
        gradient = {k: jnp.asarray(generator.normal(size=v.shape), jnp.float32) for k, v in main.items()}
        if not cfg.e_tie:
            gradient["token_embedder/bias_out"] = jnp.zeros(cfg.n_vocab)
        updates, state = update(gradient, state, main)
        main = cast(dict[str, jax.Array], optax.apply_updates(main, updates))
    saved = {"main": as_saved(state, {key: {} for key in flat if "/c_" in key}), "codebook": {"0": {}, "1": {}}}
    inner = {group: {"inner_state": part} for group, part in saved.items()}
    params = nest({**flat, **{k: np.asarray(v) for k, v in main.items()}})
    return {"step": np.asarray(n_update, np.int32), "params": params, "opt_state": {"inner_states": inner}}


@pytest.mark.parametrize(
    ("cfg", "name", "clip", "decay"),
    [
        (TINY, "adamw", True, True),
        (TIED, "lion", True, False),
        (TINY, "lion", False, True),
        (TIED, "adafactor", False, False),
        (TINY, "adafactor", True, True),
    ],
)
def test_optimizer_state_round_trips(cfg: VQConfig, name: Any, clip: bool, decay: bool) -> None:
    tree = official_file(cfg, name, clip, decay)
    found = read_optimizer(tree["opt_state"])
    assert (found.rule, found.clips, found.decays, found.count) == (name, clip, decay, 3)
    optim = OptimConfig(
        name=name,
        clip=0.1 if clip else None,
        decay=0.1 * decay,
        momentum_dtype="bfloat16" if name == "lion" else "float32",
    )
    params = map_specs(lambda spec: jnp.zeros(spec.shape), param_specs(cfg))
    state = to_opt_state(found, RunConfig(model=cfg, optim=optim), params)
    again, remarks = from_opt_state(state, optim, cfg)
    assert not remarks
    if name == "adafactor" and not cfg.e_tie:  # of a bias that is never used
        for node in (again, tree["opt_state"]):
            node["inner_states"]["main"]["inner_state"]["1" if clip else "0"]["0"]["v"]["token_embedder"].pop(
                "bias_out"
            )
    assert pack_flax(again) == pack_flax(tree["opt_state"])


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_imported_state_updates_as_the_official_one(name: Any) -> None:
    """One further update by both, from the same gradient."""
    tree, generator = official_file(TIED, name, True, True), np.random.default_rng(1)
    found = read_optimizer(tree["opt_state"])
    momentum: Any = "bfloat16" if name == "lion" else "float32"
    optim = OptimConfig(name=name, lr=1e-2 if name == "adafactor" else 1e-3, decay=0.1, momentum_dtype=momentum)
    optim = OptimConfig(**{**vars(optim), "schedule": "constant", "warmup_steps": 0})
    flat = flatten(tree["params"])
    main: dict[str, Any] = {key: jnp.asarray(value) for key, value in flat.items() if "/c_" not in key}
    gradient: dict[str, Any] = {k: jnp.asarray(generator.normal(size=v.shape), jnp.float32) for k, v in main.items()}
    chain = official_chain(name, True, True)
    state = _like(jax.eval_shape(chain.init, main), tree["opt_state"]["inner_states"]["main"]["inner_state"])
    theirs = cast(dict[str, jax.Array], optax.apply_updates(main, jax.jit(chain.update)(gradient, state, main)[0]))
    ours_params, ours_gradient = (params_from_leaves(leaves_from_reference(t, TIED), TIED) for t in (main, gradient))
    rule = optimizer(optim, param_specs(TIED))
    opt_state = to_opt_state(found, RunConfig(model=TIED, optim=optim), ours_params)
    updates, _ = jax.jit(rule.update)(ours_gradient, opt_state, ours_params)
    ours = to_reference(cast(Any, optax.apply_updates(cast(Any, ours_params), updates)), None, TIED)
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, atol=1e-5, err_msg=key)


def _like(state: Any, saved: Any) -> Any:
    if hasattr(state, "_asdict"):
        return type(state)(**{name: _like(value, saved[name]) for name, value in state._asdict().items()})
    if isinstance(state, tuple):
        return tuple(_like(value, saved[str(i)]) for i, value in enumerate(state))
    if isinstance(state, dict):
        flat = flatten(saved)
        return {name: jnp.asarray(flat[name]) for name in state}
    return jnp.asarray(saved)


def test_states_that_cannot_be_mapped_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = official_file(TINY, "adamw", True, False)
    link = tree["opt_state"]["inner_states"]["main"]["inner_state"]["1"]["0"]
    link["trace"] = link.pop("nu")
    with pytest.raises(UnsupportedOptimizer, match="mu, trace"):
        read_optimizer(tree["opt_state"])
    path = tmp_path / "checkpoint_3"
    write_flax(path, tree)
    flags = ["--block-len", "4", "--mem-len", "6", "--out"]
    import_command(["transformer-vq", str(path), *flags, str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert "optimizer state is not imported: its optimizer stores mu, trace" in output
    assert open_state(tmp_path / "run", "latest")[2] == 0
    with pytest.raises(UserError, match="cannot be imported"):
        import_command(["transformer-vq", str(path), *flags, str(tmp_path / "keep"), "--optimizer", "keep"])
    tree = official_file(TINY, "adamw", True, False)
    tree["opt_state"]["inner_states"]["main"]["inner_state"]["1"]["0"]["mu"]["token_embedder"]["embs"] = np.zeros(
        (2, 2)
    )
    write_flax(path, tree)
    import_command(["transformer-vq", str(path), *flags, str(tmp_path / "shapes")])
    assert "is needed. Training would start at step 0" in capsys.readouterr().out
    tree = official_file(TINY, "adamw", True, False)
    link = tree["opt_state"]["inner_states"]["main"]["inner_state"]["1"]["0"]
    link["nu"]["transformer_layers_0"]["scanned_attn2"]["u"] = np.zeros(3, np.float32)
    params = map_specs(lambda spec: jnp.zeros(spec.shape), param_specs(TINY))
    with pytest.raises(UnsupportedOptimizer, match="other shapes in some layers"):
        to_opt_state(read_optimizer(tree["opt_state"]), RunConfig(model=TINY), params)
    for change in ({"mu": 3}, {"count": None}):
        broken = {name: value for name, value in {**link, **change}.items() if value is not None}
        tree["opt_state"]["inner_states"]["main"]["inner_state"]["1"]["0"] = broken
        with pytest.raises(UnsupportedOptimizer, match="incomplete"):
            read_optimizer(tree["opt_state"])
    for broken in ({}, {"inner_states": {"main": {"inner_state": {"0": {}}}}}, {"inner_states": None}):
        with pytest.raises(UnsupportedOptimizer, match="chain of the official code"):
            read_optimizer(broken)


def test_muon_exports_a_fresh_state() -> None:
    optim = OptimConfig(name="muon")
    state, remarks = from_opt_state(None, optim, TINY)
    assert read_optimizer(state).rule == "adamw"
    assert "no muon" in remarks[0]
    assert "fresh" in remarks[1]


def test_large_arrays_are_chunked_as_flax_does(tmp_path: Path) -> None:
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    path = tmp_path / "file"
    path.write_bytes(pack_flax({"a": {"b": array}, "n": np.int32(3)}, chunk_bytes=12))
    tree = read_flax(path)
    np.testing.assert_array_equal(tree["a"]["b"], array)
    assert int(tree["n"]) == 3


def test_exported_run_continues_as_the_original(tmp_path: Path) -> None:
    """Two updates, out and in again, two more: the same parameters as four in one go."""
    source = corpus(tmp_path)
    optim = {
        "optim.steps": 8,
        "optim.warmup_steps": 2,
        "train.sample_tokens": 0,
        "train.eval_every": 0,
        "train.ema_decay": None,
    }
    cfg = config(source, **optim)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(TINY, n_vocab=259, block_len=8))
    train(cfg, RunFolder(tmp_path / "whole"), quiet=True, stop_at=4)
    train(cfg, RunFolder(tmp_path / "first"), quiet=True, stop_at=2)
    out = tmp_path / "checkpoint_2"
    export_command([str(tmp_path / "first"), "--format", "transformer-vq", "--checkpoint", "latest", "--out", str(out)])
    import_command(["transformer-vq", str(out), "--source", str(source), "--out", str(tmp_path / "again")])
    imported = codec.load(tmp_path / "again" / "config.json")
    assert (imported.optim, imported.model, imported.data) == (cfg.optim, cfg.model, cfg.data)
    train(imported, RunFolder(tmp_path / "again"), quiet=True, stop_at=4)
    whole, again = (open_state(tmp_path / name, "latest")[1] for name in ("whole", "again"))
    assert int(whole.step) == int(again.step) == 4
    for part in ("params", "buffers", "opt_state"):
        for (name, a), (_, b) in zip(*(named_leaves(getattr(s, part)) for s in (whole, again)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{part}/{name}")
