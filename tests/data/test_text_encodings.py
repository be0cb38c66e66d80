"""Token encodings from captions to a sample: how encoders make them, `linnet data embed` stores them and priors use them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import embedding_files as files
import numpy as np
import pytest
from image_files import png
from tiny_prior import model

from linnet.cli.dispatch import main
from linnet.config import codec
from linnet.config.schema import PairsConfig, RunConfig, TrainConfig
from linnet.core.errors import UserError
from linnet.data.embeddings import open_pairs
from linnet.data.embeddings.embed import MANIFEST, read_manifest
from linnet.data.embeddings.provenance import find_encoder
from linnet.data.encoders import open_encoder
from linnet.data.encoders.hashed_ngrams import MAX_WORDS
from linnet.data.encoders.open_clip import _is_text
from linnet.data.npy_writer import RowWriter
from linnet.data.sources.emoji import open_emoji
from linnet.models.prior.config import PriorConfig
from linnet.runs.load import write_run

CAPTIONS = ["red heart: love", "a small cat", "red cat: heart, animal", "...", "the last of all words"]
LEN = 4
"""Positions of the model: fewer than the encoder has, so that a long prompt is cut as training cuts it."""
MODEL = PriorConfig(
    dim=256, depth=1, n_head=1, d_head=8, ff_mult=1, timesteps=64, text_encodings=True, max_text_len=LEN
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def linnet(*arguments: str | Path) -> Any:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code


def photos(root: Path) -> Path:
    root.mkdir()
    for i, caption in enumerate(CAPTIONS):
        (root / f"{i}.png").write_bytes(png(i))
        (root / f"{i}.txt").write_text(caption)
    return root


def stored(out: Path) -> list[np.ndarray]:
    paths = sorted((out / "text_encodings").glob("*"))
    assert [path.name for path in paths] == [f"text_encodings_{i}.npy" for i in range(len(paths))]
    return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]


# Encoders


def test_built_in_encoding_is_the_embedding_of_the_word_alone() -> None:
    encoder = open_encoder("builtin")
    embeds, encodings = encoder.encode_texts(CAPTIONS)
    assert encodings.shape == (5, encoder.text_len, 256)
    assert np.array_equal(embeds, encoder.embed_texts(CAPTIONS))
    np.testing.assert_allclose(encodings[1, :3], encoder.embed_texts(["a", "small", "cat"]), atol=1e-6)
    # Of a word after the colon, as the embedding has it.
    np.testing.assert_allclose(encodings[0, 2], encoder.embed_texts([": love"])[0], atol=1e-6)
    assert [int((one != 0).any(-1).sum()) for one in encodings] == [3, 3, 4, 0, 5]
    assert not encodings[1, 3:].any(), "padding is zeros"
    assert encoder.encode_texts(["word " * 100]).encodings[0].any(-1).all(), "long captions are cut"


@pytest.mark.optimized
def test_encodings_do_not_depend_on_what_is_encoded_with_them() -> None:
    encoder = open_encoder("builtin")
    texts = [f"{CAPTIONS[i % 5]} {i}" for i in range(70)]
    together = encoder.encode_texts(texts)
    for i in (0, 7, 8, 31, 69):
        alone = encoder.encode_texts([texts[i]])
        assert np.array_equal(alone.encodings[0], together.encodings[i])
        assert np.array_equal(alone.embeds[0], together.embeds[i])


def test_clip_tokens_after_the_end_and_token_0_are_padding() -> None:
    tokens = np.array([[6, 3, 0, 4, 7, 0, 0], [6, 7, 7, 3, 7, 0, 0]])
    assert _is_text(tokens, 7).tolist() == [[True, True, False, True, True, False, False], [True, True] + [False] * 5]


# Storing


def test_file_written_in_blocks_is_the_array(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 3, 5)).astype(np.float16)
    file = RowWriter(tmp_path / "a" / "rows.npy", (3, 5), np.dtype(np.float16))
    for at in (0, 2, 6):
        file.add(rows[at : {0: 2, 2: 6, 6: 7}[at]].astype(np.float32))
    assert not (tmp_path / "a" / "rows.npy").exists()
    file.finish()
    file.discard()
    assert np.array_equal(np.load(tmp_path / "a" / "rows.npy", mmap_mode="r"), rows)
    left = RowWriter(tmp_path / "a" / "left.npy", (3, 5), np.dtype(np.float16))
    left.discard()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["rows.npy"]


def test_embed_writes_encodings_that_training_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = photos(tmp_path / "in"), tmp_path / "out"
    assert linnet("data", "embed", source, "--out", out, "--shard-rows", "2", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["text_encodings"]["dtype"] == "float16"
    assert output["text_encodings"]["bytes"] == sum(f.stat().st_size for f in (out / "text_encodings").iterdir())
    want = open_encoder("builtin").encode_texts(CAPTIONS).encodings.astype(np.float16)
    assert np.array_equal(np.concatenate(stored(out)), want)
    cfg = PairsConfig(source=str(out), validation_fraction=0, test_fraction=0)
    pairs = open_pairs(cfg, 0, encodings=True)
    batch = pairs.read_batch(np.array([4, 0]), 2)
    assert batch.encodings is not None
    assert np.array_equal(batch.encodings, want[[4, 0]].astype(np.float32))
    assert pairs.encodings is not None
    shards: Any = pairs.encodings.shards
    assert all(isinstance(shard.array, np.memmap) for shard in shards)
    assert open_pairs(cfg, 0).encodings is None
    # Named one by one, as the reference's JSON does: they lie beside the texts.
    named: dict[str, Any] = {"images": str(out / "img_emb"), "texts": str(out / "text_emb") + "/"}
    assert open_pairs(PairsConfig(**named, batch_size=2), 0, encodings=True).text_len == MAX_WORDS
    moved = (out / "text_encodings").rename(tmp_path / "moved")
    assert open_pairs(PairsConfig(**named, batch_size=2), 0, encodings=True).text_len is None
    pairs = open_pairs(PairsConfig(**named, encodings=str(moved), batch_size=2), 0, encodings=True)
    assert pairs.text_len == MAX_WORDS


def test_how_encodings_are_stored_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = photos(tmp_path / "in")
    assert linnet("data", "embed", source, "--out", tmp_path / "none", "--text-encodings", "none") == 0
    assert "No token encodings." in capsys.readouterr().out
    assert not (tmp_path / "none" / "text_encodings").exists()
    chosen = ("--text-encodings", "float32", "--text-len", "3")
    assert linnet("data", "embed", source, "--out", tmp_path / "short", *chosen) == 0
    want = open_encoder("builtin").encode_texts(CAPTIONS).encodings
    (short,) = stored(tmp_path / "short")
    assert short.dtype == np.float32
    assert np.array_equal(short, want[:, :3])
    # Embedded images whose captions get both.
    assert linnet("data", "embed", tmp_path / "none", "--out", tmp_path / "added") == 0
    assert np.array_equal(stored(tmp_path / "added")[0], want.astype(np.float16))
    for flags, words in (
        (("--text-len", "49"), "--text-len is 49, but it must be from 1 to 48"),
        (("--text-encodings", "none", "--text-len", "3"), "--text-len is 3, but it must be omitted"),
    ):
        assert linnet("data", "embed", source, "--out", tmp_path / "new", *flags) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    # A folder of an older version has none, and says how it is continued.
    assert linnet("data", "embed", source, "--out", tmp_path / "none") == 2
    assert "or add --text-encodings none" in capsys.readouterr().err
    assert linnet("data", "embed", source, "--out", tmp_path / "none", "--text-encodings", "none") == 0


def test_encodings_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in", sizes=(files.N,))
    (root / "text_encodings").mkdir()
    for shape, words in (
        ((files.N, 2, files.TEXT + 1), "width of the token encodings"),
        ((files.N - 1, 2, files.TEXT), "rows, but"),
        ((files.N, files.TEXT), "3 axes"),
    ):
        np.save(root / "text_encodings" / "text_encodings_8.npy", np.ones(shape, np.float16))
        with pytest.raises(UserError, match=words):
            open_pairs(PairsConfig(source=str(root)), 0, encodings=True)
    with pytest.raises(UserError, match="data.images is None, but it must be given where data.encodings is"):
        PairsConfig(encodings="x")


def test_emoji_pairs_have_encodings_of_their_captions(monkeypatch: pytest.MonkeyPatch) -> None:
    images, captions, split_of = open_emoji(32)
    rows = [split_of.index(name) for name in ("train", "validation", "test")]
    few = (images[rows], [captions[i] for i in rows], [split_of[i] for i in rows])
    monkeypatch.setattr("linnet.data.embeddings.emoji.open_emoji", lambda size: few)
    want = open_encoder("builtin").encode_texts(few[1]).encodings.astype(np.float16)
    for _ in range(2):  # made, then read from the cache
        pairs = open_pairs(PairsConfig(batch_size=1), 0, encodings=True)
        encodings = pairs.read_batch(np.arange(3), 3).encodings
        assert encodings is not None
        assert np.array_equal(encodings, want.astype(np.float32))
    assert open_pairs(PairsConfig(batch_size=1), 0).encodings is None


# Sampling


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    path = root / "run"
    assert linnet("data", "embed", photos(root / "in"), "--out", root / "pairs") == 0
    data = PairsConfig(source=str(root / "pairs"), validation_fraction=0, test_fraction=0)
    cfg = RunConfig(family="prior", model=MODEL, data=data, train=TrainConfig(eval_timesteps=(4,)))
    write_run(path, cfg, model(MODEL), None)
    return path


def sampled(run: Path, capsys: pytest.CaptureFixture[str], *flags: str | Path) -> list[dict[str, Any]]:
    assert not linnet("sample", run, *flags, "--steps", "4", "--seed", "7", "--out", run.parent / "out", "--json")
    return json.loads(capsys.readouterr().out)["texts"]


@pytest.mark.slow
@pytest.mark.optimized
def test_prompt_its_files_and_the_server_give_the_same_bits(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["red heart", "smiling cat with heart eyes"]
    output = [sampled(run, capsys, "--prompt", text, "--n", "2")[0] for text in texts]
    embeds, encodings = open_encoder("builtin").encode_texts(texts)
    encodings = encodings[:, :LEN]
    np.save(tmp_path / "texts.npy", embeds)
    np.save(tmp_path / "tokens.npy", encodings)
    given = ("--embedding", tmp_path / "texts.npy", "--text-encodings", tmp_path / "tokens.npy", "--n", "2")
    by_file = sampled(run, capsys, *given)
    assert [one["embedding"] for one in by_file] == [one["embedding"] for one in output]
    np.save(tmp_path / "tokens.npy", encodings[::-1])
    swapped = sampled(run, capsys, *given)
    assert swapped[0]["embedding"] != output[0]["embedding"], "encodings are not ignored"
    # The server, from words and from vectors cut to their real length, several in one call.
    requests, answers = tmp_path / "asks.jsonl", tmp_path / "answers.jsonl"
    how = {"seed": 7, "n": 2, "steps": 4}
    tokens = [[row.tolist() for row in one if row.any()] for one in encodings]
    bodies = [
        {"input": texts, **how},
        {"embeddings": embeds.tolist(), "text_encodings": tokens, **how},
        {"embeddings": embeds[0].tolist(), "encodings": tokens[0], **how},
        {"embeddings": embeds[0].tolist(), **how},
    ]
    lines = [{"custom_id": str(i), "url": "/v1/priors/sample", "body": body} for i, body in enumerate(bodies)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not linnet("serve", run, "--slots", "3", "--batch", requests, answers)
    found = sorted((json.loads(line) for line in answers.read_text().splitlines()), key=lambda one: one["custom_id"])
    words, vectors, one, without = (one["response"] for one in found)
    for answer in (words, vectors):
        assert [text["embedding"] for text in answer["body"]["data"]] == [text["embedding"] for text in output]
    assert one["body"]["data"][0]["embedding"] == output[0]["embedding"]
    assert without["status_code"] == 400
    assert "text_encodings is None" in without["body"]["error"]["message"]


@pytest.mark.slow
@pytest.mark.optimized
def test_releases_that_hide_text_are_served_as_they_are_sampled(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There the number of positions, padding included, decides where the embedding stands."""
    cfg = dataclasses.replace(MODEL, text_conditioning="mask", scores="product", max_text_len=LEN)
    data = codec.load(run / "config.json").pairs
    made = RunConfig(family="prior", model=cfg, data=data, train=TrainConfig(eval_timesteps=(4,)))
    write_run(tmp_path / "run", made, model(cfg), None)
    (output,) = sampled(tmp_path / "run", capsys, "--prompt", "red heart")
    requests, answers = tmp_path / "asks.jsonl", tmp_path / "answers.jsonl"
    body = {"input": ["red heart", "a cat"], "seed": 7, "steps": 4}
    requests.write_text(json.dumps({"custom_id": "0", "url": "/v1/priors/sample", "body": body}) + "\n")
    assert not linnet("serve", tmp_path / "run", "--slots", "2", "--batch", requests, answers)
    answer = json.loads(answers.read_text())["response"]["body"]
    assert answer["data"][0]["embedding"] == output["embedding"]


def test_prior_with_encodings_is_not_sampled_without(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embeds, encodings = open_encoder("builtin").encode_texts(["red heart"])
    encodings = encodings[:, :LEN]
    text, tokens = tmp_path / "text.npy", tmp_path / "tokens.npy"
    np.save(text, embeds[0])
    assert linnet("sample", run, "--embedding", text) == 2
    assert "--text-encodings is None, but it must be given: this prior was trained with" in capsys.readouterr().err
    for values, words in (
        (encodings[0, :, :8], "width 8', but it must be 1 to 4 of width 256"),
        (np.zeros((5, 256)), "5 positions"),
        (np.repeat(encodings, 2, 0), "one row for each embedding"),
        (np.full((2, 256), np.nan), "finite"),
        (np.zeros(256), "one row for each embedding"),
        (np.array(["a"]), "an .npy file of numbers"),
    ):
        np.save(tokens, values)
        assert linnet("sample", run, "--embedding", text, "--text-encodings", tokens) == 2
        assert words in capsys.readouterr().err
    np.save(tokens, encodings[0])
    assert linnet("sample", run, "--prompt", "red heart", "--text-encodings", tokens) == 2
    assert "left out without --embedding" in capsys.readouterr().err
    np.save(tokens, np.zeros((1, 256)))
    assert sampled(run, capsys, "--embedding", text, "--text-encodings", tokens), "a row of zeros says: no tokens"
    plain = tmp_path / "plain"
    cfg = dataclasses.replace(MODEL, text_encodings=False, max_text_len=0)
    write_run(plain, RunConfig(family="prior", model=cfg, data=PairsConfig()), model(cfg), None)
    assert linnet("sample", plain, "--embedding", text, "--text-encodings", tokens) == 2
    assert "trained without token encodings" in capsys.readouterr().err


def test_run_remembers_its_encoder_when_its_data_is_gone(tmp_path: Path) -> None:
    gone = PairsConfig(source=str(tmp_path / "gone"))
    assert find_encoder(gone, tmp_path) is None
    for record, name in (("{", None), ("[]", None), ('{"encoder": 3}', None), ('{"encoder": "builtin"}', "builtin")):
        (tmp_path / "data.json").write_text(record)
        assert find_encoder(gone, tmp_path) == name
    source, out = photos(tmp_path / "in"), tmp_path / "out"
    assert linnet("data", "embed", source, "--out", out) == 0
    assert open_pairs(PairsConfig(source=str(out), batch_size=2), 0).describe()["encoder"] == "builtin"
    assert read_manifest(out) is not None
    (out / MANIFEST).unlink()
    assert open_pairs(PairsConfig(source=str(out), batch_size=2), 0).describe()["encoder"] is None
