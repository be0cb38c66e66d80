"""Settings files of the reference's prior: each field is honoured, rejected or remarked on, and flags come before paths."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import typing
from pathlib import Path
from typing import Any

import embedding_files
import numpy as np
import pytest
from image_files import png

from linnet.api.training import log_remarks
from linnet.cli import main
from linnet.config.schema import OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.convert.dalle2 import schema as dalle2_schema
from linnet.convert.dalle2.config import default_run_folder, remarks, run_config
from linnet.convert.dalle2.data import complete_config
from linnet.convert.dalle2.schema import is_dalle2_config, parse_config, read_json
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.runs.metrics import read_metrics
from linnet.train.prior_task import PriorTask

FILES = Path(__file__).parents[1] / "goldens" / "dalle2_configs"
SMALLEST = {"prior": {"net": {"dim": 16, "depth": 1}}, "data": {"image_url": "images"}}
ANOTHER = {bool: True, int: 7, float: 0.25, str: "another", dict: {"a": 1}, object: "another"}
# Where any other value would do nothing, or would be no choice.
CHOSEN: dict[str, Any] = {
    "prior.net.dim": 32,
    "prior.net.num_timesteps": 1000,
    "prior.loss_type": "l1",
    "prior.beta_schedule": "sigmoid",
    "tracker.log.log_type": "wandb",
    "tracker.tracker_type": "wandb",
    "tracker.load.load_from": "local",
    "train.cosine_decay_max_steps": 1,
    "train.eval_timesteps": [8],
    "tracker.save.save_to": "huggingface",
    "tracker.save.save_type": "model",
    "data.num_data_points": 700,
}


SAVED = (("latest", "last"), ("best", "best"))


def newer(**changes: Any) -> dict[str, Any]:
    values = read_json(FILES / "newer.json")
    for name, value in changes.items():
        put(values, name.replace("__", "."), value)
    return values


def put(values: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def parts(values: dict[str, Any]) -> dalle2_schema.DallE2Config:
    return parse_config(values, Path("settings.json"))


def fields(cls: type, where: str = "") -> list[tuple[str, Any]]:
    """Every field of a file, by its dotted name, with its type."""
    found: list[tuple[str, Any]] = []
    for name, hint in typing.get_type_hints(cls).items():
        arms = [arm for arm in typing.get_args(hint) or (hint,) if arm not in (type(None), Ellipsis)]
        if dataclasses.is_dataclass(arms[0]):
            assert isinstance(arms[0], type)
            found += fields(arms[0], f"{where}{name}.")
        elif isinstance(getattr(cls, name, None), property) is False:
            found.append((where + name, arms[0]))
    return found


def outcome(values: dict[str, Any]) -> Any:
    """All that a user can notice."""
    try:
        read = parts(values)
        return run_config(read), list(remarks(read)), default_run_folder(read, Path("settings.json"))
    except UserError as error:
        return str(error)


def test_newer_config_gives_the_expected_run() -> None:
    assert run_config(parts(newer())) == RunConfig(
        preset="dalle2-prior",
        family="prior",
        seed=31,
        model=PriorConfig(
            dim=16,
            depth=1,
            n_head=2,
            d_head=8,
            ff_mult=2,
            max_text_len=4,
            timesteps=100,
            normformer=True,
            p_drop_attention=0.1,
            p_drop_ff=0.05,
            p_drop_text=0.2,
            p_drop_image=0.2,
            loss="huber",
        ),
        data=PairsConfig(
            images="<where your image embeddings are>",
            metadata="<where your captions are>",
            validation_fraction=0.2,
            test_fraction=0.1,
            batch_size=6,
        ),
        optim=OptimConfig(
            lr=2e-3,
            schedule="dampened_constant",
            warmup_steps=2,
            steps=58_334,  # 5 times 70,000 pairs, 6 at a time
            clip=0.4,
            decay=0.03,
            decay_by_lr=True,
            b1=0.9,
            b2=0.99,
            eps=1e-6,
        ),
        train=TrainConfig(
            ema_decay=0.98,
            ema_power=2 / 3,
            ema_after=3,
            ema_every=10,
            eval_every=0,
            eval_minutes=1.5,
            eval_timesteps=(10, 100),
            checkpoint_every=0,
            checkpoint_minutes=20.0,
            trackers=("wandb",) if importlib.util.find_spec("wandb") else (),
            exports=tuple(f"{w}:checkpoint:{Path.cwd() / 'prior-run' / f'{n}.pth'}" for w, n in SAVED),
        ),
    )


def test_older_config_gives_the_expected_run() -> None:
    cfg = run_config(parts(read_json(FILES / "older.json")))
    model = cfg.prior
    assert (model.depth, model.n_time_token, model.ff_mult, model.schedule) == (2, 2, 3, "linear")
    assert model.text_encodings
    assert model.max_text_len == 256
    assert model.dtype == "bfloat16"
    assert cfg.pairs.texts == "https://example.org/pairs/text_emb/"
    assert (cfg.train.checkpoint_every, cfg.train.checkpoint_minutes, cfg.train.ema_decay) == (500, 0.0, 0.99)
    assert cfg.train.eval_timesteps == (50,)  # 64 would be more than there are
    assert cfg.train.trackers == ()


@pytest.mark.parametrize(
    ("name", "kind"), fields(dalle2_schema.DallE2Config), ids=lambda x: x if isinstance(x, str) else ""
)
def test_no_field_is_ignored_silently(name: str, kind: Any) -> None:
    before = copy.deepcopy(SMALLEST)
    value = CHOSEN.get(name, ANOTHER.get(kind))
    default = next((f.default for f in dataclasses.fields(_owner(name)) if f.name == name.split(".")[-1]), None)
    value = (not default) if kind is bool and default is True else value
    assert value is not None, f"no other value is known for {name}"
    after = copy.deepcopy(before)
    if name.startswith("tracker.save."):
        put(after, "tracker.save", [{name.split(".")[-1]: value}])
    else:
        put(after, name, value)
    assert outcome(after) != outcome(before), f"{name} changes nothing and nothing is said of it"


def _owner(name: str) -> type:
    cls: type = dalle2_schema.DallE2Config
    for part in name.split(".")[:-1]:
        hint = typing.get_type_hints(cls)[part]
        arms = [arm for arm in typing.get_args(hint) or (hint,) if arm not in (type(None), Ellipsis)]
        cls = arms[0]
    return cls


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prior.loss_type", "l3", "prior.loss_type is 'l3', but it must be one of 'l1', 'l2', 'huber'"),
        ("prior.predict_xstart", True, "unknown setting prior.'predict_xstart'; did you mean 'predict_x_start'?"),
        ("prior.net.head", 8, "unknown setting prior.net.'head'; did you mean 'heads'?"),
        ("train.learning_rate", 1, "unknown setting train.'learning_rate'"),
        ("tracker.log.wandb_projects", "x", "did you mean 'wandb_project'?"),
        ("evaluate", {}, "unknown setting 'evaluate'"),
        ("decoder", {}, "Linnet has no decoder"),
        ("data.splits.test", 0.2, r"fractions that sum to 1 \(these sum to 1.1\)"),
        ("data.splits", {"train": 0, "val": 0.5, "test": 0.5}, "data.splits.train is 0, but it must be above 0"),
        ("data.image_url", None, "data.image_url is missing"),
        ("prior.net.depth", None, "prior.net.depth is missing"),
        ("prior.net.depth", "12", "prior.net.depth is '12', but it must be of type int"),
        ("prior.image_embed_dim", 17, r"prior.net.dim \(16\)"),
        ("prior.net.num_timesteps", 99, r"prior.timesteps \(100\), or null"),
        ("train.epochs", 0, "train.epochs is 0, but it must be at least 1"),
        ("train.current_epoch", 2, "train.current_epoch is 2, but it must be 0.*linnet import dalle2-prior"),
        ("tracker.load", {"load_from": "local"}, "tracker.load.file_path is missing"),
        ("tracker.load", {"load_from": "wandb", "file_path": "a"}, "load_from is 'wandb', but it must be local"),
        ("tracker.load", {"load_from": "local", "file_path": "s3://a/b.pth"}, "a path on this machine"),
        ("load", {"source": "file"}, "load.file_path is missing"),
        ("tracker.save", [{"save_latest_to": True}], "save_latest_to is True, but it must be a path, or false"),
        ("tracker.save", [{"save_best_to": "s3://a/b.pth"}], "a path on this machine"),
        ("tracker.log.log_type", "custom", "one of 'console', 'wandb'"),
    ],
)
def test_changes_that_alter_training_are_rejected(name: str, value: Any, words: str) -> None:
    values = newer()
    put(values, name, value)
    with pytest.raises(UserError, match=words):
        run_config(parts(values))


def test_fractions_may_be_off_by_rounding() -> None:
    run_config(parts(newer(data__splits={"train": 0.333333, "val": 0.333333, "test": 0.333333})))


def test_continuous_time_and_targets_are_read() -> None:
    cfg = run_config(parts(newer(prior__net__num_timesteps=None, prior__predict_v=True))).prior
    assert (cfg.continuous_time, cfg.timesteps, cfg.objective) == (True, 100, "v")
    assert run_config(parts(newer(prior__predict_x_start=False))).prior.objective == "noise"
    assert run_config(parts(newer(prior__text_cond_drop_prob=0.0))).prior.can_guide is False
    assert run_config(parts(newer(train__use_ema=False))).train.ema_decay is None


def test_wave_of_its_own_length_is_kept() -> None:
    optim = run_config(parts(newer(train__cosine_decay_max_steps=58_000))).optim
    assert (optim.schedule, optim.steps, optim.extra_steps) == ("dampened_cosine", 58_000, 334)


# Paths and lengths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return embedding_files.folder(
        tmp_path / "pairs", embedding_files.vectors(width=16), embedding_files.vectors(width=16, seed=3)
    )


def opened(values: dict[str, Any], flags: dict[str, Any] | None = None, **data: Any) -> tuple[RunConfig, list[str]]:
    read = parts(values)
    requested = run_config(read)
    requested = dataclasses.replace(requested, data=dataclasses.replace(requested.pairs, **data), **(flags or {}))
    return complete_config(read, requested)


def test_both_embeddings_in_one_layout_are_found_and_give_the_length(folder: Path) -> None:
    cfg, output = opened(newer(), images=str(folder / "img_emb"))
    assert (cfg.pairs.source, cfg.pairs.images, cfg.pairs.metadata) == (str(folder), None, None)
    # 23 pairs: 2 test, 4 validate, 17 train; 5 times 17 are 15 batches of 6.
    assert (cfg.optim.steps, cfg.optim.extra_steps, cfg.optim.warmup_steps) == (15, 0, 2)
    assert any("there are 23 pairs" in words for words in output)
    fewer, output = opened(newer(data__num_data_points=12), images=str(folder / "img_emb"))
    assert fewer.optim.steps == 7  # 5 times 8.4 pairs
    assert any("data.num_data_points is 12 of 23 pairs" in words for words in output)
    exact, output = opened(newer(data__num_data_points=23), images=str(folder / "img_emb"))
    assert exact.optim.steps == 15
    assert not any("num_data_points" in words for words in output)


def test_length_given_by_a_flag_stays(folder: Path) -> None:
    optim = dataclasses.replace(run_config(parts(newer())).optim, steps=4)
    assert opened(newer(), {"optim": optim}, images=str(folder / "img_emb"))[0].optim.steps == 4


def test_separate_locations_are_used_unchanged(folder: Path) -> None:
    places: dict[str, Any] = {"images": str(folder / "img_emb"), "texts": str(folder / "text_emb")}
    cfg, output = opened(newer(), **places)
    assert (cfg.pairs.images, cfg.pairs.texts, cfg.pairs.metadata) == (*places.values(), None)
    assert any("data.meta_url (<where your captions are>) is not a local path" in words for words in output)


def test_images_flag_overrides_addresses_of_the_config(folder: Path) -> None:
    old = read_json(FILES / "older.json")
    put(old, "prior.condition_on_text_encodings", False)
    cfg, _ = opened(old, images=str(folder / "img_emb"))
    assert (cfg.pairs.source, cfg.pairs.images, cfg.pairs.texts) == (str(folder), None, None)
    assert cfg.optim.steps == 6  # twice 21 of 23 pairs, 8 at a time
    with pytest.raises(UserError, match="data.text_url is 'gs://texts'.*--data.texts PATH"):
        opened(old, images=str(folder / "img_emb"), texts="gs://texts")


def test_source_sets_all_locations(folder: Path) -> None:
    cfg, _ = opened(newer(), source=str(folder))
    assert (cfg.pairs.source, cfg.pairs.images, cfg.pairs.metadata) == (str(folder), None, None)


def test_unreadable_locations_are_rejected_with_the_fix(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="data.image_url is '<where .*placeholder. Fix: .*--data.images PATH --data.metadata"
    ):
        opened(newer())
    with pytest.raises(UserError, match="data.image_url is 'https://.*on this machine.*download it"):
        opened(read_json(FILES / "older.json"))
    with pytest.raises(UserError, match="data.image_url is 's3://bucket"):
        opened(newer(), images="s3://bucket/img_emb")
    elsewhere = tmp_path / "only"
    elsewhere.mkdir()
    np.save(elsewhere / "img_0.npy", embedding_files.vectors(width=16))
    command = f"linnet data embed {elsewhere} --metadata captions --encoder open_clip:ViT-L-14/openai --out DIR"
    with pytest.raises(UserError, match=f"`{command}` and add --data.source DIR"):
        opened(newer(), images=str(elsewhere), metadata="captions")
    own = newer(prior__clip={"make": "coca"})
    with pytest.raises(UserError, match="with coca's own model: write its text embeddings"):
        opened(own, images=str(elsewhere), metadata="captions")
    with_tokens = newer(prior__condition_on_text_encodings=True)
    with pytest.raises(UserError, match="condition_on_text_encodings is True.*--model.no-text-encodings"):
        opened(with_tokens, images=str(folder / "img_emb"))


def test_example_config_runs_on_pairs_of_data_embed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From captions and images, with the paths that the file names, token encodings included."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for i in range(8):
        (tmp_path / "photos" / f"{i}.png").write_bytes(png(i))
        (tmp_path / "photos" / f"{i}.txt").write_text(f"picture number {i}")
    assert said_by(["data", "embed", "photos", "--out", "laion"], capsys)[0] == 0
    wide = {"prior__net__dim": 256, "prior__image_embed_dim": 256, "prior__condition_on_text_encodings": True}
    places = {"data__image_url": "laion/img_emb/", "data__meta_url": "laion/metadata/", "train__warmup_steps": 50}
    for more in ({}, {"data__text_url": "laion/text_emb/"}):
        read = parts(newer(**wide, **places, **more))
        cfg, output = complete_config(read, run_config(read))
        assert cfg.prior.text_encodings
        assert cfg.optim.warmup_steps == 50 > cfg.optim.steps, "a short run is within its warm-up, as in the reference"
        assert any("train.warmup_steps is 50, more than" in words for words in output)
        batch = PriorTask(cfg).batch(0)
        assert batch.encodings is not None
        assert batch.encodings.shape == (6, 48, 256)
        assert batch.encodings[:, :3].any(-1).all()


# The command


def test_file_types_are_detected_by_content() -> None:
    assert is_dalle2_config(newer())
    assert not is_dalle2_config({"version": 1, "family": "prior", "model": {}})
    assert not is_dalle2_config([1])


def said_by(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    out, err = capsys.readouterr()
    return exit.value.code, " ".join((out + err).split())


def test_remarks_are_printed_and_recorded_before_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, output = opened(newer(), images=str(folder / "img_emb"))
    log_remarks(cfg, tmp_path / "run", output)
    events = [r["message"] for r in read_metrics(tmp_path / "run") if r["event"] == "warning"]
    assert events == output == capsys.readouterr().err.splitlines()
    wide = dataclasses.replace(cfg, model=dataclasses.replace(cfg.prior, dim=32))
    with pytest.raises(UserError, match="model.dim is 32"):
        log_remarks(wide, tmp_path / "never", output)
    assert not (tmp_path / "never").exists()


@pytest.mark.trial
def test_command_trains_from_a_settings_file_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["train", "--train.eval-timesteps", "4", "--config", str(FILES / "newer.json")]
    argv.append(f"--data.images={folder / 'img_emb'}")
    code, words = said_by(argv, capsys)
    assert code == 0
    assert "Starting at step 0 of 15" in words
    records = read_metrics(tmp_path / "prior-run")
    assert any("overwrite_data_path" in r.get("message", "") for r in records)
    assert any("metrics/ema-validation/huber-loss" in r for r in records)
    cfg = read_json(tmp_path / "prior-run" / "config.json")
    assert (cfg["family"], cfg["optim"]["steps"], cfg["data"]["source"]) == ("prior", 15, str(folder))
    code, words = said_by(argv, capsys)
    assert code == 0
    assert "step 15 of 15" in words


def test_rejected_file_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said_by(["train", str(FILES / "newer.json")], capsys)[0] == 2
    code, words = said_by(["train", f"--config={FILES / 'newer.json'}", "--data.source", "nowhere"], capsys)
    assert code == 2
    assert "data.source is 'nowhere'" in words
    code, words = said_by(["train", "quickstart", "--config", str(FILES / "newer.json")], capsys)
    assert code == 2
    assert "both say what to train" in words
    assert said_by(["train", "--config"], capsys)[0] == 2
    assert list(tmp_path.iterdir()) == []
