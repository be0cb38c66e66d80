"""`linnet sample` with a prior: text or vectors in, the nearest images out, and only flags that mean something."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import embedding_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tiny_prior import config, model

from linnet.cli import main
from linnet.config import codec
from linnet.config.schema import PairsConfig, RunConfig, TrainConfig
from linnet.core import rng
from linnet.core.errors import UserError
from linnet.data.embeddings import open_pairs
from linnet.data.embeddings.embed import EmbedManifest
from linnet.data.embeddings.neighbors import l2_normalize
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.encoders import open_encoder
from linnet.models.prior.sampling import prepare, sample
from linnet.models.prior.solver import make_solver
from linnet.runs.load import write_run

EMOJI = config(dim=256, depth=1, max_text_len=0, text_encodings=False)
SMALL = config(depth=1, text_encodings=False)
PROMPT = "smiling cat with heart eyes"


def written(path: Path, cfg: Any, data: PairsConfig) -> Path:
    write_run(
        path, RunConfig(family="prior", model=cfg, data=data, train=TrainConfig(eval_timesteps=(4,))), model(cfg), None
    )
    return path


@pytest.fixture(scope="module")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("emoji") / "run", EMOJI, PairsConfig())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On pairs that no one knows the encoder of."""
    root = tmp_path_factory.mktemp("small")
    pairs = embedding_files.folder(
        root / "pairs", embedding_files.vectors(width=16), embedding_files.vectors(width=16, seed=3)
    )
    return written(root / "run", SMALL, PairsConfig(source=str(pairs)))


def linnet(*arguments: str | Path) -> Any:
    with pytest.raises(SystemExit) as exit:
        main(["sample", *map(str, arguments)])
    return exit.value.code


@pytest.mark.slow
def test_prompt_retrieves_images_and_saves_the_embedding(emoji: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not linnet(emoji, "--prompt", PROMPT, "--n", "2", "--nearest", "3", "--seed", "5", "--json")
    output = json.loads(capsys.readouterr().out)
    (text,) = output["texts"]
    place, sheet = map(Path, output["files"])
    assert (place.parent, sheet.suffix, output["solver"]) == (emoji / "samples", ".png", "dpm")
    # What the model itself makes of it, drawn as a server would.
    reported = open_encoder("builtin").embed_texts([PROMPT])
    keys = jnp.stack([rng.fold_in_name(rng.root(seed), "sample") for seed in (5, 6)])
    prepared = jax.jit(prepare, static_argnums=1)(model(EMOJI), EMOJI)
    drawn = sample(prepared, jnp.repeat(reported, 2, axis=0), None, make_solver(EMOJI, 16, "dpm"), keys, EMOJI)
    cosines = l2_normalize(np.asarray(drawn)) @ l2_normalize(reported)[0]
    best = int(np.argmax(cosines))
    np.testing.assert_allclose(text["cosines_with_text"], cosines, rtol=1e-5)
    assert text["seed"] == 5 + best
    np.testing.assert_array_equal(np.load(place), np.asarray(drawn)[best : best + 1])
    np.testing.assert_array_equal(np.float32(text["embedding"]), np.asarray(drawn)[best])
    pairs = open_pairs(PairsConfig(), 0)
    every = l2_normalize(pairs.images.read(np.arange(3786))) @ l2_normalize(np.asarray(drawn)[best])
    nearest = [near["row"] for near in text["nearest"]]
    np.testing.assert_allclose(every[nearest], np.sort(every)[::-1][:3], rtol=1e-5)
    assert pairs.text_captions is not None
    assert [near["caption"] for near in text["nearest"]] == pairs.text_captions.read(np.array(nearest))
    with Image.open(io.BytesIO(sheet.read_bytes())) as image:
        assert image.size == (3 * 66 + 2, 66 + 2)
    # In words, with the same seed, the same.
    assert not linnet(emoji, "--prompt", PROMPT, "--n", "2", "--nearest", "3", "--seed", "5")
    words = capsys.readouterr().out
    for near in text["nearest"]:
        assert f"{near['cosine']:.3f}  {near['caption']}" in words
    assert str(sheet) in words


def test_embeddings_are_accepted_without_a_known_encoder(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "texts.npy", embedding_files.vectors(2, 16))
    flags = ("--embedding", tmp_path / "texts.npy", "--nearest", "40", "--steps", "4", "--solver", "ddim")
    assert not linnet(small, *flags, "--guidance", "2", "--out", tmp_path / "out", "--json")
    output = json.loads(capsys.readouterr().out)
    assert [text["text"] for text in output["texts"]] == ["texts[0]", "texts[1]"]
    # The reference's DDIM takes one step fewer than it is asked for.
    assert (output["steps"], output["guidance"], output["files"]) == (
        3,
        2.0,
        [str(tmp_path / "out" / "texts-seed0.npy")],
    )
    assert all(len(text["nearest"]) == 23 for text in output["texts"])
    assert np.load(output["files"][0]).shape == (2, 16)


def test_guidance_that_has_no_effect_is_reported_as_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "one.npy", embedding_files.vectors(1, 16))
    cfg = dataclasses.replace(SMALL, text_conditioning="learned_padding")
    run = written(tmp_path / "run", cfg, PairsConfig(source="gone"))
    assert not linnet(run, "--embedding", tmp_path / "one.npy", "--steps", "2", "--guidance", "2", "--json")
    output = capsys.readouterr()
    assert json.loads(output.out)["guidance"] == 1.0
    assert "Guidance 2 has no effect" in output.err


def test_run_without_its_data_still_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "one.npy", embedding_files.vectors(1, 16)[0])
    for source, why in (
        (PairsConfig(), "the prior's width, 16; these have 256"),
        (PairsConfig(source="gone"), "is 'gone'"),
    ):
        run = written(tmp_path / source.source, SMALL, source)
        assert not linnet(run, "--embedding", tmp_path / "one.npy", "--steps", "4")
        output = capsys.readouterr().out
        assert "No nearest images: data.source " in output
        assert why in output
        assert (run / "samples" / "one-seed0.npy").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--prompt is '', but it must be a text"),
        (("--prompt", "a cat"), "no encoder is recorded for the pairs"),
        (("--prompt", "a cat", "--embedding", "wide.npy"), "given without a prompt"),
        (("--embedding", "wide.npy"), "rows of 16"),
        (("--embedding", "none.npy"), "No such file"),
        (("--embedding", "text.npy"), "an .npy file of numbers"),
        (("--embedding", "nan.npy"), "finite numbers"),
        (("--embedding", "good.npy", "--temperature", "0.5"), "--temperature is 0.5, but it must be left out"),
        (("--embedding", "good.npy", "--max-tokens", "5"), "--max-tokens"),
        (("--embedding", "good.npy", "--complete", "a.png"), "--complete"),
        (("--embedding", "good.npy", "--steps", "41"), "steps is 41, but it must be from 2 to 40"),
        (("--embedding", "good.npy", "--solver", "ddpm", "--steps", "4"), "40 with ddpm"),
        (("--embedding", "good.npy", "--guidance", "-1"), "--guidance is -1.0"),
        (("--embedding", "good.npy", "--nearest", "0"), "--nearest"),
        (("--embedding", "good.npy", "--weights", "int8"), "float32 or bfloat16"),
    ],
)
def test_invalid_combinations_are_rejected(
    flags: tuple[str, ...],
    words: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("wide.npy", np.zeros((1, 17), np.float32))
    np.save("nan.npy", np.full((1, 16), np.nan, np.float32))
    np.save("good.npy", embedding_files.vectors(1, 16))
    Path("text.npy").write_text("no numbers")
    assert linnet(small, *flags) == 2
    assert words in capsys.readouterr().err


def test_token_run_rejects_prior_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codec.save(RunConfig(), tmp_path / "config.json")
    for name, value in (
        ("--steps", "4"),
        ("--solver", "dpm"),
        ("--guidance", "2"),
        ("--nearest", "3"),
        ("--embedding", "a"),
    ):
        assert linnet(tmp_path, name, value) == 2
        assert f"{name} is" in (output := capsys.readouterr().err)
        assert "left out" in output


def test_encoder_is_known_from_provenance(tmp_path: Path) -> None:
    assert find_encoder(PairsConfig()) == "builtin"
    assert find_encoder(PairsConfig(source=str(tmp_path))) is None
    EmbedManifest(task={"encoder": "open_clip:A/b"}, finished=True).save(tmp_path)
    assert find_encoder(PairsConfig(source=str(tmp_path))) == "open_clip:A/b"
    images = str(tmp_path / "img_emb")
    assert find_encoder(PairsConfig(images=images)) is None
    assert find_encoder(PairsConfig(images=images, texts=str(tmp_path / "text_emb"))) == "open_clip:A/b"
    assert find_encoder(PairsConfig(images=images, texts=str(tmp_path / "elsewhere"))) is None
    (tmp_path / "embed.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        find_encoder(PairsConfig(source=str(tmp_path)))
