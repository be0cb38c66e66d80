"""`linnet imagine`: from words to pixels, the same for the same seed, and runs that do not go together are rejected."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from image_runs import PAINTER, PRIOR, SHAPE, write_untrained
from PIL import Image

import linnet
from linnet.cli import main
from linnet.config.schema import RunConfig
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.data.sources.emoji import open_emoji
from linnet.generate.text_to_image import Imagination, open_imagination
from linnet.models.prior import sampling as prior_sampling
from linnet.models.prior.solver import make_solver
from linnet.nn.sampling import sampling_settings


def changed(cfg: RunConfig, **changes: Any) -> RunConfig:
    """Keyed by dotted names."""
    for name, value in changes.items():
        part, _, field = name.partition(".")
        cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(getattr(cfg, part), **{field: value})})
    return cfg


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("imagine")
    return write_untrained(folder / "prior", PRIOR), write_untrained(folder / "painter", PAINTER)


@pytest.fixture(scope="module")
def both(runs: tuple[Path, Path]) -> Imagination:
    return open_imagination(*runs)


def imagined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["imagine", *arguments])
    out, err = capsys.readouterr()
    return int(exit.value.code or 0), out, err


def test_text_becomes_image_files(
    runs: tuple[Path, Path], both: Imagination, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "heart.png"
    where = ["--prior", str(runs[0]), "--painter", str(runs[1]), "--out", str(out)]
    code, words, _ = imagined(capsys, "red heart", *where, "--n", "2", "--seed", "5", "--steps", "4", "--json")
    assert code == 0
    record = json.loads(words)
    assert [image["seed"] for image in record["pictures"]] == [5, 6]
    captions = open_emoji(32)[1]
    for image in record["pictures"]:
        assert len(image["nearest"]) == 3
        assert all(near["caption"] in captions and -1 <= near["cosine"] <= 1 for near in image["nearest"])
    files = [Path(image["file"]) for image in record["pictures"]]
    assert sorted(path.name for path in out.parent.iterdir()) == ["heart.png", "heart_0000.png", "heart_0001.png"]
    painted = [np.asarray(Image.open(file)) for file in files]
    assert [image.shape for image in painted] == [SHAPE, SHAPE]
    # The second alone, by its own seed: what stands beside it makes no difference.
    embeds = both.embeds("red heart", [6], steps=4)
    np.testing.assert_allclose(np.linalg.norm(embeds, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(both.paint(embeds, sampling_settings(1), [6], guidance=1.5)[0], painted[1])


def test_api_imagines_what_the_command_does(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With runs as folders, and loaded once."""
    where = ["--prior", str(runs[0]), "--painter", str(runs[1]), "--out", str(tmp_path / "heart.png")]
    _, words, _ = imagined(capsys, "red heart", *where, "--n", "2", "--seed", "5", "--steps", "4", "--json")
    record = json.loads(words)
    prior, painter = map(linnet.load, runs)
    folders: dict[str, Any] = {"prior": runs[0], "painter": runs[1]}
    loaded: dict[str, Any] = {"prior": prior, "painter": painter}
    for given in (folders, loaded):
        images = linnet.imagine("red heart", **given, n=2, seed=5, steps=4)
        assert images.seeds == (5, 6)
        assert images.sheet() == Path(record["sheet"]).read_bytes()
        for found, image in zip(images.nearest, record["pictures"], strict=True):
            assert [near.caption for near in found] == [near["caption"] for near in image["nearest"]]
    with pytest.raises(linnet.UserError, match="prior is .*family vq"):
        linnet.imagine("red heart", prior=painter, painter=painter)
    with pytest.raises(linnet.UserError, match="painter is .*nothing conditions"):
        linnet.imagine("red heart", prior=prior, painter=prior)
    for changed, message in (
        ({"n": 0}, "n is 0"),
        ({"guidance": -1.0}, "guidance is -1"),
        ({"text": " "}, "some words"),
    ):
        with pytest.raises(linnet.UserError, match=message):
            linnet.imagine(**{"text": "x", "prior": tmp_path, "painter": tmp_path, **changed})


def test_prior_samples_texts_as_its_encoder_reads_them(runs: tuple[Path, Path]) -> None:
    prior = linnet.load(runs[0])
    found = prior.sample(["a cat", "red heart"], steps=4, nearest=3)
    assert found.texts == ("a cat", "red heart")
    assert found.embeddings.shape == (2, 256)
    assert [len(row) for row in found.nearest] == [3, 3]
    assert found.pictures is not None
    assert Image.open(io.BytesIO(found.sheet() or b"")).format == "PNG"
    np.testing.assert_allclose(prior.sample("red heart", steps=4).embeddings[0], found.embeddings[1], atol=1e-5)


def test_text_the_embedding_and_guidance_make_a_difference(both: Imagination) -> None:
    one, two = (both.embeds(text, [0, 0], steps=4) for text in ("red heart", "a blue whale in the sea"))
    np.testing.assert_array_equal(one[0], one[1])
    assert np.abs(one - two).max() > 1e-3
    settings = sampling_settings(1)
    first, second = both.paint(np.stack([one[0], two[0]]), settings, [1, 1])
    assert (first != second).any()
    assert (both.paint(one[:1], settings, [1], guidance=3.0)[0] != first).any()


def test_prior_with_token_encodings_gets_those_of_the_text(runs: tuple[Path, Path], tmp_path: Path) -> None:
    cfg = changed(PRIOR, **{"model.max_text_len": 4, "model.text_encodings": True})
    both = open_imagination(write_untrained(tmp_path / "tokens", cfg), runs[1])
    embeds = both.embeds("red heart", [0, 1], steps=4)
    text = both.encoder.encode_texts(["red heart"])
    plan = make_solver(cfg.prior, 4)

    def drawn(encodings: np.ndarray) -> np.ndarray:
        embed, tokens = (jnp.repeat(jnp.asarray(one), 2, 0) for one in (text.embeds, encodings))
        prepared = prior_sampling.prepared(both.prior.params, cfg.prior)
        keys = jnp.stack([rng.sample_key(seed) for seed in (0, 1)])
        found = np.asarray(prior_sampling.sample(prepared, embed, tokens, plan, keys, cfg.prior))
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    np.testing.assert_array_equal(drawn(text.encodings), embeds)
    assert np.abs(drawn(np.zeros_like(text.encodings)) - embeds).max() > 1e-4


def test_absent_runs_are_named_with_the_commands_that_make_them(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where in ([], ["--prior", str(runs[0]), "--painter", str(tmp_path)]):
        code, _, err = imagined(capsys, "red heart", *where)
        assert code == 2
        assert "linnet train prior-emoji" in err
        assert "linnet train emoji-imagine" in err


def test_incompatible_runs_are_rejected(runs: tuple[Path, Path], tmp_path: Path) -> None:
    prior, painter = runs
    with pytest.raises(UserError, match="prior is .*family vq"):
        open_imagination(painter, painter)
    with pytest.raises(UserError, match="painter is .*nothing conditions"):
        open_imagination(prior, prior)
    plain = dataclasses.replace(PAINTER, model=dataclasses.replace(PAINTER.vq, d_condition=0, n_place=0))
    with pytest.raises(UserError, match="painter is .*nothing conditions"):
        open_imagination(prior, write_untrained(tmp_path / "plain", plain))
    with pytest.raises(UserError, match=r"model.d_condition of .* is 8, .* 256"):
        open_imagination(prior, write_untrained(tmp_path / "narrow", changed(PAINTER, **{"model.d_condition": 8})))
    elsewhere = changed(PRIOR, **{"data.source": "laion"})
    with pytest.raises(UserError, match="encoder is known"):
        open_imagination(write_untrained(tmp_path / "laion", elsewhere), painter)


def test_encoder_that_differs_is_rejected(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linnet.generate.text_to_image.find_encoder", lambda pairs, run: "open_clip:ViT-B-32/openai")
    with pytest.raises(UserError, match=r"data.condition of .* is 'builtin', .*open_clip"):
        open_imagination(*runs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("  ",), "some words"),
        (("heart", "--n", "0"), "--n is 0"),
        (("heart", "--seed", "-1"), "--seed is -1"),
        (("heart", "--guidance", "-2"), "--guidance is -2"),
        (("heart", "--out", "heart.jpg"), r"--out is 'heart.jpg'"),
        (("heart", "--top-p", "0"), "--top-p is 0"),
    ],
)
def test_flags_that_make_no_sense_are_rejected(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = imagined(capsys, *arguments)
    assert code == 2
    assert words in err


def test_painter_trained_without_dropout_of_conditions_cannot_be_guided(both: Imagination) -> None:
    always = changed(both.painter.cfg, **{"model.p_drop_condition": 0.0})
    one = dataclasses.replace(both, painter=dataclasses.replace(both.painter, cfg=always))
    with pytest.raises(UserError, match="guidance is 2.0"):
        one.paint(np.ones((1, 256), np.float32), sampling_settings(1), [0], guidance=2.0)
