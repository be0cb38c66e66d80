"""Trainer checkpoints of the reference continue: the next updates are the reference's own, and runs become checkpoints again."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from linnet.cli import main
from linnet.config.schema import RunConfig
from linnet.convert.dalle2.export import trainer_file
from linnet.convert.dalle2.prior import ImportedPrior, read_prior_checkpoint
from linnet.convert.dalle2.trainer import UnusableTrainerState, read_trainer_state, store_trainer, with_adam
from linnet.convert.torch_pickle import read_torch
from linnet.convert.torch_writer import write_torch
from linnet.core.errors import UserError
from linnet.models import registry
from linnet.models.prior.convert import ROTARY, to_reference
from linnet.models.prior.diffusion import Draws, loss
from linnet.models.prior.params import param_specs
from linnet.optim import ema
from linnet.optim.optimizer import optimizer
from linnet.parallel import sharding
from linnet.runs.state import TrainState
from linnet.runs.stored_trainer import TrainerProgress, check_trainer, resume_trainer, trainer_progress
from linnet.train import parent as parents
from linnet.train.exports import progress_at
from linnet.train.finetune_config import tuned_config

CHECKPOINTS = Path(__file__).parents[1] / "goldens" / "prior" / "ckpt"
WARMUP = CHECKPOINTS / "warmup_1.15.6_checkpoint.pth"


def run_config(found: ImportedPrior, path: Path) -> RunConfig:
    from linnet.convert.dalle2.config import optim_config, train_config
    from linnet.convert.dalle2.schema import Train
    from linnet.convert.dalle2.trainer import train_settings

    trainer = read_trainer_state(found.content, found.cfg, found.facts.get("version"), path)
    train = dataclasses.replace(Train(ema_update_after_step=0, ema_update_every=2), **train_settings(trainer))
    return RunConfig(
        preset="dalle2-prior",
        family="prior",
        model=found.cfg,
        data=configs_pairs(),
        optim=with_adam(optim_config(train, 100), trainer),
        train=train_config(train, found.cfg.timesteps),
    )


def configs_pairs() -> Any:
    from linnet.config.schema import PairsConfig

    return PairsConfig(batch_size=4)


def restored(path: Path, folder: Path) -> tuple[RunConfig, TrainState, int]:
    """Import, storage and the state that training starts from."""
    found = read_prior_checkpoint(path, {"text_encodings": True})
    cfg = run_config(found, path)
    folder.mkdir()
    store_trainer(folder, found, read_trainer_state(found.content, found.cfg, found.facts.get("version"), path))
    check_trainer(folder, cfg)
    rule = optimizer(cfg.optim, param_specs(found.cfg))
    return cfg, *resume_trainer(folder, registry.get("prior"), cfg, rule, sharding.make_mesh())


@pytest.mark.slow
@pytest.mark.optimized
def test_next_updates_are_the_references_own(tmp_path: Path) -> None:
    golden = np.load(CHECKPOINTS / "warmup_1.15.6_next.npz")
    cfg, state, step = restored(WARMUP, tmp_path / "run")
    assert (step, int(state.step), cfg.optim.warmup_steps, cfg.optim.lr) == (5, 5, 12, 0.003)
    rule, average = optimizer(cfg.optim, param_specs(cfg.prior)), ema.settings(cfg.train)
    assert average is not None

    @jax.jit
    def update(params: Any, opt_state: Any, mean: Any, step: Any, rows: Any, draws: Draws) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *rows, draws, cfg.prior)
        updates, opt_state = rule.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, ema.update(average, mean, params, step), value

    params, opt_state, mean = state.params, state.opt_state, state.ema
    every = jnp.ones(golden["in/times"].shape[1], bool)
    for i in range(len(golden["in/times"])):
        rows = [jnp.asarray(golden[f"in/{n}"][i]) for n in ("image_embed", "text_embed", "text_encodings")]
        times, noise = jnp.asarray(golden["in/times"][i]), jnp.asarray(golden["in/noise"][i])
        draws = Draws(times=times, noise=noise, keep_text=every, keep_image=every, self_conditioned=every, dropout=None)
        params, opt_state, mean, value = update(params, opt_state, mean, step + i, rows, draws)
        np.testing.assert_allclose(value, golden["out/loss"][i], rtol=1e-5)
        compare(golden, f"out/step{i + 1}/model/", to_reference(params, cfg.prior))
        compare(golden, f"out/step{i + 1}/ema/", to_reference(mean, cfg.prior))


def compare(golden: Any, prefix: str, found: dict[str, np.ndarray]) -> None:
    for name in golden.files:
        if name.startswith(prefix):
            expected = golden[name]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found[name.removeprefix(prefix)], expected, atol=1e-5 * scale, err_msg=name)


def same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_state_becomes_a_trainer_checkpoint_and_comes_back_to_the_bit(tmp_path: Path) -> None:
    """And the file that comes out has the tensors, numbers and groups of the one that went in."""
    cfg, state, step = restored(WARMUP, tmp_path / "run")
    write_torch(
        tmp_path / "again.pth",
        trainer_file(state, cfg, epoch=2, samples_seen=20, best_validation_loss=0.5),
    )
    _, again, step_again = restored(tmp_path / "again.pth", tmp_path / "second")
    assert step == step_again
    same(again, dataclasses.replace(state, key=again.key))  # pyright: ignore[reportArgumentType, reportCallIssue]
    first, second = read_torch(WARMUP), read_torch(tmp_path / "again.pth")
    for part in ("model", "ema_model", "ema"):
        assert list(second[part]) == list(first[part]), part
        for name, value in first[part].items():
            assert second[part][name].shape == value.shape, name
            if not name.endswith(ROTARY):
                np.testing.assert_allclose(second[part][name], value, rtol=1e-6, atol=1e-12, err_msg=name)
    theirs, ours = first["optimizer"], second["optimizer"]
    assert list(ours["state"]) == list(theirs["state"])
    for n, entry in theirs["state"].items():
        for name, value in entry.items():
            np.testing.assert_array_equal(ours["state"][n][name], value, err_msg=f"{n} {name}")
    for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {name: pytest.approx(value) if name == "lr" else value for name, value in group.items()} == mine
    assert second["scheduler"] == {n: v for n, v in first["scheduler"].items() if n != "_is_initial"}
    for name in ("step", "epoch", "samples_seen", "best_validation_loss"):
        assert second[name] == first[name]


def broken(change: Any) -> dict[str, Any]:
    content = read_torch(WARMUP)
    content = {**content, "optimizer": copy.deepcopy(content["optimizer"])}
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.pop("optimizer"), "no optimizer state"),
        (lambda c: c["optimizer"].update(state=[]), "no optimizer state"),
        (lambda c: c["optimizer"]["param_groups"][0]["params"].pop(), "another number of parameters"),
        (lambda c: c["optimizer"]["param_groups"].pop(), "another number of parameters"),
        (lambda c: c["optimizer"]["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda c: c["optimizer"]["state"][3].update(step=4), "equally often"),
        (lambda c: c["optimizer"]["state"][3].update(exp_avg=np.zeros(3)), "shape of its parameter"),
        (
            lambda c: c["optimizer"]["state"][3].update(exp_avg_sq=-(c["model"]["net.to_time_embeds.0.weight"] ** 2)),
            "shape|damaged",
        ),
        (lambda c: c["model"].update({"clip.x": np.zeros(2)}), "CLIP"),
        (lambda c: c["ema"].update(step=np.array(9)), "another step count"),
        (lambda c: c["optimizer"]["state"].clear(), "nothing was trained"),
    ],
)
def test_unmappable_state_is_rejected_with_the_reason(change: Any, why: str) -> None:
    found = read_prior_checkpoint(WARMUP)
    with pytest.raises(UnusableTrainerState, match=why):
        read_trainer_state(broken(change), found.cfg, "1.15.6", WARMUP)


def test_releases_that_did_not_record_the_order_are_rejected() -> None:
    found = read_prior_checkpoint(WARMUP)
    for version in ("0.6.2", "0.9.4", None):
        with pytest.raises(UnusableTrainerState, match="order"):
            read_trainer_state(found.content, found.cfg, version, WARMUP)


def linnet(*arguments: str | Path) -> Any:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in ("img_emb", "text_emb"):
        (tmp_path / "pairs" / name).mkdir(parents=True)
        np.save(tmp_path / "pairs" / name / f"{name}_0.npy", draw.normal(size=(60, 24)).astype(np.float32))
    return tmp_path / "pairs"


def test_training_continues_from_an_imported_trainer_and_exports_as_it_goes(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", run)
    assert "Training continues at step 5" in capsys.readouterr().out
    flags = ("--data.source", pairs, "--data.batch-size", "4", "--train.log-every", "1", "--quiet")
    assert linnet("train", run, *flags, "--optim.steps", "13", "--optim.name", "lion") == 2
    assert "optim.name" in capsys.readouterr().err
    latest, best = tmp_path / "out" / "latest_{samples_seen}.pth", tmp_path / "out" / "best.pth"
    exports = ("--train.exports", f"latest:checkpoint:{latest}", f"best:model:{best}")
    assert not linnet("train", run, *flags, "--optim.steps", "14", *exports)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(6, 15))
    assert [line["lr"] for line in lines if line["kind"] == "train"][:2] == pytest.approx([0.0015, 0.00175])
    written = read_prior_checkpoint(tmp_path / "out" / "latest_56.pth")
    assert written.facts["step"] == 14
    assert read_trainer_state(written.content, written.cfg, "1.15.6", tmp_path / "out" / "latest_56.pth").step == 14
    assert read_prior_checkpoint(best).which == "ema"
    capsys.readouterr()
    for out, kind in (("m.pth", "dalle2-prior"), ("t.pth", "dalle2-trainer"), ("m.safetensors", "dalle2-prior")):
        assert not linnet("export", run, "--format", kind, "--out", tmp_path / out)
    again = tmp_path / "again"
    assert not linnet("import", "dalle2-prior", tmp_path / "t.pth", "--out", again, "--optimizer", "keep")
    assert "continues at step 14" in capsys.readouterr().out
    assert linnet("import", "dalle2-prior", tmp_path / "m.pth", "--out", tmp_path / "c", "--optimizer", "keep") == 2
    assert "no optimizer state" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_file_names_the_checkpoint_and_the_output_folder(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tracker.load and tracker.save of the reference, for local files; the same command then continues the run."""
    monkeypatch.chdir(tmp_path)
    net = {"dim": 24, "depth": 2, "heads": 3, "dim_head": 8, "max_text_len": 4, "num_timesteps": 40, "ff_mult": 2}
    values: dict[str, Any] = {
        "prior": {"net": net, "timesteps": 40, "condition_on_text_encodings": False},
        "data": {"image_url": str(pairs / "img_emb"), "batch_size": 4},
        "train": {"warmup_steps": 12, "lr": 0.003},
        "tracker": {
            "data_path": "cache",
            "load": {"load_from": "local", "file_path": str(WARMUP)},
            "save": [
                {"save_to": "local", "save_latest_to": "saved/latest.pth", "save_best_to": False},
                {"save_to": "local", "save_type": "model", "save_best_to": "saved/best.pth"},
                {"save_to": "huggingface", "huggingface_repo": "a/b", "save_latest_to": "x.pth"},
            ],
        },
    }
    Path("settings.json").write_text(
        json.dumps({**values, "tracker": {"load": {"load_from": "url", "url": "http://x"}}})
    )
    assert linnet("train", "settings.json") == 2
    assert "tracker.load.load_from is 'url'" in capsys.readouterr().err
    Path("settings.json").write_text(json.dumps({**values, "prior": {**values["prior"], "net": {**net, "depth": 3}}}))
    assert linnet("train", "settings.json") == 2
    assert "model.depth" in capsys.readouterr().err
    assert not Path("cache").exists()
    Path("settings.json").write_text(json.dumps(values))
    flags = ("--optim.steps", "15", "--train.log-every", "1", "--quiet")
    assert not linnet("train", "settings.json", *flags)
    output = capsys.readouterr().err
    for words in ("tracker.load", "continues at step 5", "saved/latest.pth", "huggingface is ignored"):
        assert words in output
    lines = [json.loads(line) for line in Path("cache/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(6, 16))
    assert read_prior_checkpoint(Path("saved/latest.pth")).facts["step"] == 15
    assert read_prior_checkpoint(Path("saved/best.pth")).which == "ema"
    assert not linnet("train", "settings.json", *flags)  # the run that is there is continued, here at its end


def test_exports_are_checked_before_training(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert not linnet("import", "dalle2-prior", CHECKPOINTS / "nowarmup_model.pth", "--out", run)
    assert linnet("export", run, "--format", "dalle2-trainer", "--out", tmp_path / "t.pth") == 2
    assert "no optimizer state to export" in capsys.readouterr().err
    for text, why in (
        ("nonsense", "of the form"),
        ("best:model:a_{loss}.pth", "in braces"),
        (f"best:model:{tmp_path}", "folder"),
        ("latest:model:s3://bucket/x.pth", "s3:// locations are not supported"),
    ):
        assert linnet("train", run, "--data.source", pairs, "--train.exports", text) == 2
        assert why in capsys.readouterr().err
    assert not (run / "checkpoints").exists()
    settings = json.loads((run / "config.json").read_text())
    settings["train"]["exports"] = ["latest:model:s3://bucket/x.pth"]
    (run / "config.json").write_text(json.dumps(settings))
    assert linnet("train", run, "--data.source", pairs) == 2
    assert "train.exports is 's3://bucket/x.pth'" in capsys.readouterr().err


@pytest.mark.slow
def test_imported_trainer_is_evaluated_at_its_own_step(pairs: Path, tmp_path: Path) -> None:
    """Its step is a multiple of eval_every, so the evaluation comes before the first update."""
    run = tmp_path / "run"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", run)
    flags = ("--data.source", pairs, "--data.batch-size", "8", "--optim.steps", "8", "--optim.warmup-steps", "2")
    assert not linnet("train", run, *flags, "--train.eval-every", "5", "--quiet")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [5, 8]
    assert set(json.loads((run / "checkpoints" / "best.json").read_text())) == {"5", "8"}


@pytest.mark.slow
def test_imported_trainers_counts_are_continued(pairs: Path, tmp_path: Path) -> None:
    """The file has seen 20 samples in 5 updates; 3 updates of 8 follow."""
    run, latest = tmp_path / "run", tmp_path / "latest_{samples_seen}.pth"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", run)
    flags = ("--data.source", pairs, "--data.batch-size", "8", "--optim.steps", "8", "--quiet")
    assert not linnet("train", run, *flags, "--train.exports", f"latest:checkpoint:{latest}")
    own = min(json.loads((run / "checkpoints" / "best.json").read_text()).values())
    assert not linnet("export", run, "--format", "dalle2-trainer", "--out", tmp_path / "t.pth")
    n_pairs = json.loads((run / "data.json").read_text())["splits"]["train"]["pairs"]
    before = read_torch(WARMUP)
    assert (before["samples_seen"], before["epoch"], before["best_validation_loss"]) == (20, 2, 0.5)
    for name in ("latest_44.pth", "t.pth"):
        written = read_torch(tmp_path / name)
        assert (written["samples_seen"], written["epoch"]) == (44, 2 + 24 // n_pairs)
    assert written["best_validation_loss"] == min(own, 0.5)


def test_imports_of_earlier_versions_recorded_the_step_alone(tmp_path: Path) -> None:
    cfg, _, _ = restored(WARMUP, tmp_path / "run")
    file = tmp_path / "run" / "trainer" / "state.safetensors"
    assert progress_at(7, cfg, tmp_path / "run") == {"epoch": 2, "samples_seen": 28}
    save_file(load_file(file), file, {"format": "linnet-trainer", "step": "5", "optimizer_step": "5"})
    assert trainer_progress(tmp_path / "run") == TrainerProgress(step=5)
    assert progress_at(7, cfg, tmp_path / "run") == {"epoch": 0, "samples_seen": 28}


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_scheduler_has_a_rate_for_each_group(decay_vectors: bool, tmp_path: Path) -> None:
    cfg, state, _ = restored(WARMUP, tmp_path / "run")
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, decay=0.1, decay_vectors=decay_vectors))
    saved = trainer_file(state, cfg, epoch=0, samples_seen=0, best_validation_loss=1.0)
    groups = len(saved["optimizer"]["param_groups"])
    assert groups == (1 if decay_vectors else 2)
    assert [len(saved["scheduler"][name]) for name in ("base_lrs", "_last_lr", "lr_lambdas")] == [groups] * 3


@pytest.mark.slow
def test_fine_tuned_import_is_evaluated_at_step_0(pairs: Path, tmp_path: Path) -> None:
    """Although imports have eval_every 0; and with the optimizer state of the import, if that is wanted."""
    imported, tuned = tmp_path / "imported", tmp_path / "tuned"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", imported)
    flags = ("--data.source", pairs, "--data.batch-size", "8", "--optim.steps", "2", "--keep-optimizer", "--quiet")
    assert not linnet("train", "--from", imported, *flags, "--out", tuned)
    lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 2]


def test_optimizer_of_an_imported_trainer_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", run)
    origin = parents.find_origin(run)
    cfg = tuned_config(origin.cfg, origin.parent(keep_optimizer=True))
    parents.check_parent(cfg)
    family, rule = registry.get("prior"), optimizer(cfg.optim, param_specs(cfg.prior))
    state = parents.init_from_parent(family, cfg, rule, sharding.make_mesh())
    theirs, _ = resume_trainer(run, family, cfg, rule, sharding.make_mesh())
    for part in ("params", "ema"):
        same(getattr(state, part), getattr(theirs, part))
    kept, had = (adam_state(of.opt_state) for of in (state, theirs))
    same(kept, had)
    assert (int(kept.count), int(state.step)) == (5, 0)
    assert int(optax.tree_utils.tree_get(state.opt_state, "count", filtering=is_schedule)) == 0
    fresh = tmp_path / "fresh"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", fresh, "--optimizer", "fresh")
    origin = parents.find_origin(fresh)
    with pytest.raises(UserError, match="must be a run or an import that has optimizer state"):
        parents.check_parent(tuned_config(origin.cfg, origin.parent(keep_optimizer=True)))
    lion = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, name="lion"))
    with pytest.raises(UserError, match="optim.name is 'lion', but it must be 'adamw'"):
        parents.check_parent(lion)


def adam_state(opt_state: Any) -> Any:
    return next(
        part
        for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(part, optax.ScaleByAdamState)
    )


def is_schedule(path: Any, _: Any) -> bool:
    return any(getattr(key, "tuple_name", None) == "ScaleByScheduleState" for key in path)


def test_import_is_exported_as_the_trainer_that_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "t.pth"
    assert not linnet("import", "dalle2-prior", WARMUP, "--out", run)
    assert not linnet("export", run, "--format", "dalle2-trainer", "--out", out)
    first, second = read_torch(WARMUP), read_torch(out)
    for name in ("step", "epoch", "samples_seen", "best_validation_loss"):
        assert second[name] == first[name]
    for n, entry in first["optimizer"]["state"].items():
        for name, value in entry.items():
            np.testing.assert_array_equal(second["optimizer"]["state"][n][name], value)
    assert linnet("export", run, "--format", "dalle2-trainer", "--checkpoint", "3", "--out", out) == 2
    assert "--checkpoint is '3', but it must be best, latest or 5" in capsys.readouterr().err


def test_file_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_torch(tmp_path / "file" / "x.pth", {"a": 1})
    with pytest.raises(TypeError):
        write_torch(tmp_path / "x.pth", {"a": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
