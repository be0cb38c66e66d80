"""A prior's run from its first update to its final test: resumed, cut and judged exactly."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_comparison import assert_same_bits, lines

from linnet.config import codec
from linnet.config.schema import OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.core.pytree import named_leaves
from linnet.data.embeddings import open_pairs
from linnet.evaluate.prior import check_fit, evaluate_prior, five_cosines
from linnet.models import registry
from linnet.models.prior import family
from linnet.models.prior.config import PriorConfig
from linnet.optim import ema
from linnet.optim.optimizer import optimizer
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_run, open_state
from linnet.runs.metrics import read_metrics
from linnet.runs.state import fresh_state
from linnet.runs.trackers import flat_scalars
from linnet.train.loop import train
from linnet.train.step import update

DIM, LEN = 16, 3


def source(folder: Path) -> Path:
    """Images are their texts turned, so that there is something to learn."""
    draws = np.random.default_rng(0)
    texts = draws.normal(size=(60, DIM)).astype(np.float32)
    turn, _ = np.linalg.qr(draws.normal(size=(DIM, DIM)))
    images = texts @ turn.astype(np.float32)
    both = {"text_embeds": texts, "image_embeds": images}
    np.savez(
        folder / "pairs.npz",
        caption=np.array([f"caption {i}" for i in range(60)]),
        **{name: x / np.linalg.norm(x, axis=1, keepdims=True) for name, x in both.items()},
    )
    return folder / "pairs.npz"


def config(path: Path, **changes: Any) -> RunConfig:
    """`changes` are keyed by dotted names, as in tiny.py."""
    base = RunConfig(
        family="prior",
        model=PriorConfig(dim=DIM, depth=1, n_head=2, d_head=8, ff_mult=2, timesteps=20, p_drop_ff=0.1, self_cond=True),
        data=PairsConfig(source=str(path), batch_size=8, validation_fraction=0.2, test_fraction=0.15),
        optim=OptimConfig(
            lr=0.01, schedule="dampened_cosine", warmup_steps=4, steps=12, clip=0.5, decay=0.06, decay_by_lr=True
        ),
        train=TrainConfig(
            ema_decay=0.9,
            ema_power=2 / 3,
            ema_after=2,
            ema_every=2,
            log_every=4,
            eval_every=4,
            checkpoint_every=4,
            eval_timesteps=(5, 20),
            keep=5,
        ),
    )
    for name, value in changes.items():
        part, _, field = name.partition(".")
        base = dataclasses.replace(base, **{part: dataclasses.replace(getattr(base, part), **{field: value})})
    return base


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def uninterrupted(pairs_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole-prior") / "run"
    assert train(config(pairs_file), RunFolder(run), quiet=True).finished
    return run


@pytest.mark.slow
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    pairs_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    for stop in (3, 8):
        assert not train(config(pairs_file), RunFolder(tmp_path), quiet=True, stop_at=stop).finished
    assert train(config(pairs_file), RunFolder(tmp_path), quiet=True).finished
    got, want = open_state(tmp_path, "latest")[1], open_state(uninterrupted, "latest")[1]
    assert_same_bits(got, want)
    assert lines(tmp_path) == lines(uninterrupted)
    assert (tmp_path / "retrieval.json").read_text() == (uninterrupted / "retrieval.json").read_text()


@pytest.mark.slow
def test_finished_run_is_tested_once(pairs_file: Path, uninterrupted: Path) -> None:
    before = read_metrics(uninterrupted)
    assert train(config(pairs_file), RunFolder(uninterrupted), quiet=True).finished
    after = read_metrics(uninterrupted)
    assert sum(r["kind"] == "test" for r in before) == sum(r["kind"] == "test" for r in after) == 1


@pytest.mark.slow
def test_accumulation_changes_nothing(pairs_file: Path) -> None:
    """Noise, times, dropped conditions and dropout included: a row draws by its place in the whole batch."""
    results: list[Any] = []
    for n in (1, 4):
        cfg = config(pairs_file, **{"train.accumulate": n})
        prior = registry.get("prior")
        rule = optimizer(cfg.optim, prior.param_specs(cfg.model))
        state, data = fresh_state(prior, cfg, rule), open_pairs(cfg.pairs, cfg.seed)
        after, metrics = jax.jit(functools.partial(update, prior, cfg, rule))(state, data.batch(0))
        results.append((after.params, metrics["loss"], metrics["grad_norm"]))
    for (name, a), (_, b) in zip(named_leaves(results[0]), named_leaves(results[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5, err_msg=name)


def test_figures_have_the_reference_names(uninterrupted: Path) -> None:
    records = read_metrics(uninterrupted)
    trained = [r for r in records if r["kind"] == "train"][-1]
    assert trained["tracking/samples-seen"] == 12 * 8
    assert trained["tracking/epoch"] == 12 * 8 // 39
    assert trained["tracking/training-l2"] == trained["loss"]
    assert trained["tracking/samples-sec"] > 0
    average = ema.settings(config(Path("x")).train)
    assert average is not None
    assert trained["tracking/ema-decay"] == pytest.approx(float(ema.decay(average, 12)))
    for kind, split in (("eval", "validation"), ("test", "test")):
        evaluated = [r for r in records if r["kind"] == kind][-1]
        assert evaluated["split"] == split
        for n in (5, 20):
            baseline, text, image, unrelated, difference = (
                evaluated[f"metrics/ema-{split}/{name} [steps={n}]"]
                for name in (
                    "baseline similarity",
                    "similarity with text",
                    "similarity with original image",
                    "similarity with unrelated caption",
                    "difference from baseline similarity",
                )
            )
            assert difference == pytest.approx(text - baseline)
            assert all(-1 <= x <= 1 for x in (baseline, text, image, unrelated))
        assert (
            evaluated["loss"]
            == evaluated[f"metrics/ema-{split}/l2-loss"]
            != evaluated[f"metrics/online-{split}/l2-loss"]
        )
    shown = dict(flat_scalars([r for r in records if r["kind"] == "eval"][-1]))
    assert "metrics/ema-validation/l2-loss" in shown  # as it is, not below our own names
    assert "eval/validation/loss" in shown


def test_best_checkpoint_is_that_of_the_lowest_average_loss(uninterrupted: Path) -> None:
    losses = {
        r["step"]: r["metrics/ema-validation/l2-loss"] for r in read_metrics(uninterrupted) if r["kind"] == "eval"
    }
    assert open_run(uninterrupted, "best").step == min(losses, key=lambda step: losses[step])


@pytest.mark.slow
def test_evaluation_averages_over_pairs_for_any_batch_size(pairs_file: Path, uninterrupted: Path) -> None:
    """12 validation pairs in batches of 8 and of 5: the last one is not full, and counts by its pairs. A rolled caption stays in
    its batch, so those figures follow the batches."""
    cfg = config(pairs_file)
    state, pairs = open_state(uninterrupted, "latest")[1], open_pairs(cfg.pairs, cfg.seed)
    weights = {"online": state.params, "ema": state.ema}
    reported = [r for r in read_metrics(uninterrupted) if r["kind"] == "eval"][-1]
    for size in (8, 5):
        found = evaluate_prior(cfg, weights, pairs, "validation", batch_size=size)
        assert found.pairs == 12
        for name, value in found.to_json().items():
            if isinstance(value, float) and not (size == 5 and "unrelated" in name):
                assert value == pytest.approx(reported[name], rel=1e-5, abs=1e-6), name


def test_five_cosines_by_hand() -> None:
    from linnet.data.embeddings import PairBatch

    texts, images = np.eye(3, 2, dtype=np.float32), np.array([[1, 1], [0, 2], [9, 9]], np.float32)
    batch = PairBatch(text_embed=texts, image_embed=images, encodings=None, mask=np.array([1, 1, 0], np.float32))
    embeds, other = np.array([[3, 0], [0, 1], [9, 9]]), np.array([[0, 1], [0, 5], [9, 9]])
    root = 2**-0.5
    found = list(five_cosines(batch, embeds, other, 2).values())
    np.testing.assert_allclose(found, [root + 1, 2, root + 1, 1, 1 - root], rtol=1e-7)


def test_test_results_are_shown_beside_three_baselines(uninterrupted: Path) -> None:
    found = json.loads((uninterrupted / "retrieval.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["prior", "best of several", "text", "mean", "ridge"]
    assert {row["n"] for row in found["rows"]} == {9}
    evaluated = [r for r in read_metrics(uninterrupted) if r["kind"] == "test"][-1]
    assert found["rows"][0]["cosine"] == pytest.approx(
        evaluated["metrics/ema-test/similarity with original image [steps=5]"]
    )
    assert found["rows"][0]["recall_1"] == evaluated["recall@1 [steps=5]"]
    assert found["rows"][1]["cosine"] != found["rows"][0]["cosine"]
    assert found["rows"][4]["cosine"] > 0.95  # images are turned texts: a line finds that


@pytest.mark.slow
def test_text_encodings_are_trained_on_and_evaluated(tmp_path: Path) -> None:
    import embedding_files

    texts, images = embedding_files.vectors(40, DIM, 1), embedding_files.vectors(40, DIM, 2)
    for name, rows in (("img_emb", images), ("text_emb", texts), ("text_encodings", np.repeat(texts[:, None], LEN, 1))):
        (tmp_path / "pairs" / name).mkdir(parents=True)
        np.save(tmp_path / "pairs" / name / f"{name}_0.npy", rows)
    changes = {
        "model.max_text_len": LEN,
        "model.text_encodings": True,
        "model.self_cond": False,
        "model.text_noise": 0.5,
    }
    cfg = config(tmp_path / "pairs", **changes, **{"train.eval_timesteps": (5,), "optim.steps": 5})
    assert train(cfg, RunFolder(tmp_path / "run"), quiet=True).finished
    assert read_metrics(tmp_path / "run")[-2]["kind"] == "test"
    # Resumed equals uninterrupted.
    part = tmp_path / "part"
    assert not train(cfg, RunFolder(part), quiet=True, stop_at=2).finished
    assert train(cfg, RunFolder(part), quiet=True).finished
    assert_same_bits(open_state(part, "latest")[1], open_state(tmp_path / "run", "latest")[1])
    assert lines(part) == lines(tmp_path / "run")
    # The evaluation reads the encodings too.
    run = open_run(tmp_path / "run", "latest")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "pairs", other)
    np.save(other / "text_encodings" / "text_encodings_0.npy", np.repeat(texts[::-1, None], LEN, 1))
    losses = [
        evaluate_prior(
            cfg, {"ema": run.params}, open_pairs(PairsConfig(source=str(at)), 0, encodings=True), "test", timesteps=()
        ).loss
        for at in (tmp_path / "pairs", other)
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.dim": 8}, "model.dim is 8, but it must be the image embeddings' width, 16"),
        ({"model.text_dim": 8}, "model.text_dim is 8, but it must be the text embeddings' width, 16"),
        ({"model.max_text_len": 3, "model.text_encodings": True}, "the data has no token encodings"),
        ({"model.max_text_len": 3, "model.text_encodings": True, "data.mix": 0.5}, "data.mix is 0.5"),
    ],
)
def test_pairs_that_do_not_fit_the_model_are_rejected_before_anything_starts(
    pairs_file: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    cfg = config(pairs_file, **changes)
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        check_fit(open_pairs(cfg.pairs, 0, encodings=cfg.prior.text_encodings), cfg.prior)
    with pytest.raises(UserError):
        train(cfg, RunFolder(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_contradictory_settings_are_rejected(pairs_file: Path) -> None:
    with pytest.raises(UserError, match=r"train.eval_timesteps .* at most the diffusion's model.timesteps \(20\)"):
        config(pairs_file, **{"train.eval_timesteps": (64,)})
    cfg = config(pairs_file)
    with pytest.raises(UserError, match="data is 'PairsConfig', but it must be DataConfig with family 'vq'"):
        RunConfig(data=cfg.data)
    for ask in (
        lambda: cfg.tokens,
        lambda: cfg.lm,
        lambda: cfg.vq,
        lambda: RunConfig().pairs,
        lambda: RunConfig().prior,
    ):
        with pytest.raises(UserError, match="family"):
            ask()


def test_every_setting_is_in_the_file_and_comes_back(pairs_file: Path, tmp_path: Path) -> None:
    cfg = config(pairs_file, **{"model.text_noise": 0.5, "data.mix": 0.25, "model.dtype": "bfloat16"})
    codec.save(cfg, tmp_path / "config.json")
    assert codec.load(tmp_path / "config.json") == cfg


def test_mixed_pairs_interpolate_two_and_keep_their_norm(pairs_file: Path) -> None:
    plain, mixed = (open_pairs(config(pairs_file, **{"data.mix": chance}).pairs, 0) for chance in (0.0, 0.5))
    before, after = plain.batch(3), mixed.batch(3)
    changed = np.any(before.text_embed != after.text_embed, axis=1)
    assert 0 < changed.sum() < 8
    np.testing.assert_array_equal(changed, np.any(before.image_embed != after.image_embed, axis=1))
    np.testing.assert_array_equal(before.text_embed[~changed], after.text_embed[~changed])
    for name in ("text_embed", "image_embed"):
        np.testing.assert_allclose(np.linalg.norm(getattr(after, name), axis=1), 1.0, rtol=1e-5)
    train_rows = plain.read_batch(plain.split("train"), plain.n_rows("train"))
    for row in np.flatnonzero(changed):
        # What was added to the text lies in the direction of one pair's, and to the image of the same pair's.
        found = []
        for name in ("text_embed", "image_embed"):
            own, got, rows = (np.asarray(getattr(x, name), np.float64) for x in (before, after, train_rows))
            away = got[row] - (got[row] @ own[row]) * own[row]
            others = rows - (rows @ own[row])[:, None] * own[row]
            found.append(int(np.argmax(others @ away / np.maximum(np.linalg.norm(others, axis=1), 1e-6))))
        assert found[0] == found[1]


def test_hosts_share_one_mixed_batch(pairs_file: Path) -> None:
    pairs = open_pairs(config(pairs_file, **{"data.mix": 1.0}).pairs, 0)
    uninterrupted, halves = pairs.batch(5), [pairs.batch(5, host, 2) for host in range(2)]
    np.testing.assert_array_equal(uninterrupted.text_embed, np.concatenate([half.text_embed for half in halves]))
    np.testing.assert_array_equal(uninterrupted.image_embed, np.concatenate([half.image_embed for half in halves]))


def test_blurred_text_is_another_direction_of_the_same_length(pairs_file: Path) -> None:
    """And a row's blur depends on its place in the whole batch alone."""
    text = np.asarray(open_pairs(config(pairs_file).pairs, 0).batch(0).text_embed) * 3
    blurred = np.asarray(family._blurred(rng.root(0), jnp.asarray(text), 0, 1.0))
    np.testing.assert_allclose(np.linalg.norm(blurred, axis=1), 3.0, rtol=1e-5)
    cosines = (blurred * text).sum(1) / 9
    assert np.all(cosines < 0.99)
    assert np.all(cosines > 0.3)
    later = np.asarray(family._blurred(rng.root(0), jnp.asarray(text[4:]), 4, 1.0))
    np.testing.assert_array_equal(later, blurred[4:])
