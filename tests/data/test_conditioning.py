"""Images with their embeddings: each row gets its own, and what does not fit is rejected before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from image_files import png, write_folder
from prepared_data import ListSource, task_of
from run_comparison import assert_same_bits, lines

from linnet.config.schema import EMOJI_PAIRS, DataConfig, PairsConfig
from linnet.core.errors import UserError
from linnet.data import TokenDataset, load_dataset
from linnet.data.embeddings import open_pairs
from linnet.data.encoders.builtin import open_builtin
from linnet.data.images import ids_to_pixels
from linnet.data.prepare.pipeline import prepare
from linnet.data.sources.emoji import open_emoji
from linnet.data.sources.images import open_images
from linnet.runs.folder import RunFolder
from linnet.runs.load import open_state
from linnet.train.loop import train

N = 20
LEN = 4 * 4 * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pictures")
    pictures = write_folder(made / "files", {f"{i:02d}.png": png(i) for i in range(N)})
    prepare(task_of(open_images(str(pictures)), size=4), made / "data")
    return made / "data"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def opened(source: Path | str, condition: Path | str | None, length: int = LEN) -> TokenDataset:
    shown = None if condition is None else str(condition)
    return load_dataset(
        DataConfig(source=str(source), sequence_len=length, update_len=length, batch_size=3, condition=shown), 1
    )


def written(path: Path, rows: Any) -> Path:
    np.save(path, rows)
    return path


def test_every_image_has_its_own_row_in_training_and_evaluation(folder: Path, tmp_path: Path) -> None:
    """The row of image i is made of its first three pixels' values, so it can be told from the ids."""
    plain = opened(folder, None)
    first = np.concatenate([plain.split(name).content(0, 10**6).reshape(-1, LEN)[:, :9] for name in _splits()])
    data = opened(folder, written(tmp_path / "rows.npy", first.astype(np.float64)))
    assert plain.batch(0).condition is None
    batches = [data.batch(step) for step in range(4)]
    for name in ("validation", "test"):
        batches += data.evaluation(name, 3)
    for batch in batches:
        real = batch.loss_mask[:, 0] > 0
        want = ids_to_pixels(np.asarray(batch.targets), (3, LEN))[0][:, :9].astype(np.float32)
        want = want / np.maximum(np.linalg.norm(want, axis=1, keepdims=True), 1e-9) * real[:, None]
        np.testing.assert_allclose(batch.condition, want, atol=1e-6)
    assert any(not (batch.loss_mask[:, 0] > 0).all() for batch in batches), "no batch was filled up"
    assert data.fingerprint != plain.fingerprint
    data.check_fit(259, 1, 9)


def _splits() -> tuple[str, ...]:
    return ("train", "validation", "test")


def test_built_in_encoder_embeds_prepared_images_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(folder, "builtin")
    for name in _splits():
        pictures = data.split(name).content(0, 10**6).reshape(-1, 4, 4, 3)
        large = pictures.repeat(8, axis=1).repeat(8, axis=2)
        found = data.embeds(name)
        assert found is not None
        np.testing.assert_allclose(found, open_builtin().embed_images(large), atol=1e-6)
    monkeypatch.setattr("linnet.data.encoders.builtin.open_builtin", lambda: pytest.fail("embedded again"))
    again = opened(folder, "builtin")
    assert again.fingerprint == data.fingerprint
    np.testing.assert_array_equal(again.embeds("train"), data.embeds("train"))


def test_small_emoji_have_the_embeddings_of_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # they take seconds to make: other tests have made them
    data, pairs = opened("emoji-16", "builtin", 768), open_pairs(PairsConfig(source=EMOJI_PAIRS), 0)
    for name in _splits():
        np.testing.assert_array_equal(data.embeds(name), pairs.images.read(pairs.split(name)))
    pictures, _, split_of = open_emoji(16)
    batch = next(iter(data.evaluation("test", 3)))
    shown = ids_to_pixels(np.asarray(batch.targets), (3, 16, 16, 3))[0]
    np.testing.assert_array_equal(shown, pictures[np.array(split_of) == "test"][:3])


def test_missing_rows_for_images_are_rejected(folder: Path, tmp_path: Path) -> None:
    rows = np.ones((N, 5), np.float32)
    written(tmp_path / "few.npy", rows[:-1])
    written(tmp_path / "whole.npy", rows.astype(int))
    written(tmp_path / "flat.npy", rows[:, 0])
    rows[7] = 0
    written(tmp_path / "zero.npy", rows)
    rows[7] = np.nan
    written(tmp_path / "nan.npy", rows)
    (tmp_path / "text.npy").write_text("no array")
    for name in ("few", "whole", "flat", "text", "absent"):
        with pytest.raises(UserError, match=r"data.condition is .*" + name):
            opened(folder, tmp_path / f"{name}.npy")
    for name in ("zero", "nan"):
        with pytest.raises(UserError, match="row 7"):
            opened(folder, tmp_path / f"{name}.npy")


def test_text_has_no_condition(source: Path, tmp_path: Path) -> None:
    prepare(task_of(ListSource([[b"some text"] * 3] * 9)), tmp_path / "text")
    for text in (source, tmp_path / "text"):
        with pytest.raises(UserError, match="is text, not images"):
            opened(text, "builtin")


def test_model_and_data_that_do_not_fit_are_rejected(folder: Path, tmp_path: Path) -> None:
    reported = opened(folder, written(tmp_path / "rows.npy", np.ones((N, 5), np.float32)))
    for data, width, words in (
        (reported, 4, "model.d_condition is 4, .* 5"),
        (reported, 0, "model.d_condition is 0, .* 5"),
        (opened(folder, None), 5, "data.condition is None, .* width 5"),
    ):
        with pytest.raises(UserError, match=words):
            data.check_fit(259, 1, width)


@pytest.mark.trial
def test_conditioned_run_resumes_exactly_and_by_micro_batches(folder: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.npy", np.random.default_rng(0).standard_normal((N, 5)))
    changes = {
        "data.sequence_len": LEN,
        "model": dataclasses.replace(
            tiny.MODEL,
            n_head=1,
            p_dropemb=0.0,
            p_dropsin=0.0,
            p_dropres=0.0,
            p_droplyr=0.0,
            restart_dead_codes=False,
            d_condition=5,
            n_place=LEN,
            p_drop_condition=0.3,
            condition_noise=0.2,
        ),
        "data.condition": str(rows),
        "optim.steps": 8,
        "train.accumulate": 2,
        "train.eval_every": 8,
        "train.checkpoint_every": 4,
    }
    cfg = tiny.config(folder, **changes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(cfg, RunFolder(whole), quiet=True)
    train(cfg, RunFolder(parts), quiet=True, stop_at=4)
    train(cfg, RunFolder(parts), quiet=True)
    assert_same_bits(open_state(whole, "latest")[1], open_state(parts, "latest")[1])
    assert lines(whole) == lines(parts)
