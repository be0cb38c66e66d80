"""`linnet data embed`: images and captions of every kind become pairs, once, and a killed run continues exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import embedding_files as files
import numpy as np
import pyarrow.parquet as pq
import pytest
from image_files import png

from linnet.cli.dispatch import main
from linnet.core.errors import UserError
from linnet.data.embeddings import PairsConfig, open_pairs
from linnet.data.embeddings.captioned_images import CaptionedImage, open_captioned
from linnet.data.embeddings.embed import MANIFEST, EmbedManifest, EmbedTask, embed, read_manifest
from linnet.data.embeddings.encodings import EncodingSettings
from linnet.data.encoders.builtin import open_builtin
from linnet.data.images import decode_pixels

IMAGES = {f"{name}.png": png(i) for i, name in enumerate(("a", "b", "c", "d", "e"))}
CAPTIONS = {name: f"picture {name[0]}: a square" for name in IMAGES}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def linnet(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return exit.value.code


def write_source(root: Path, kind: str) -> Path:
    root.mkdir()
    if kind == "parquet":
        return files.parquet(root / "in.parquet", image=list(IMAGES.values()), caption=list(CAPTIONS.values()))
    if kind == "tar":
        members = {}
        for i, name in enumerate(IMAGES):
            key = name.removesuffix(".png")
            members[name] = IMAGES[name]
            if i % 2:
                members[f"{key}.json"] = json.dumps({"caption": CAPTIONS[name]}).encode()
            else:
                members[f"{key}.txt"] = CAPTIONS[name].encode()
        return files.tar(root / "in.tar", members)
    for name, content in IMAGES.items():
        (root / name).write_bytes(content)
        if kind == "txt":
            (root / name).with_suffix(".txt").write_text(CAPTIONS[name] + "\n")
    if kind == "json":
        (root / "captions.json").write_text(json.dumps(CAPTIONS))
    if kind == "jsonl":
        rows = [{"file_name": name, "caption": caption} for name, caption in CAPTIONS.items()]
        (root / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if kind == "table":
        files.parquet(root / "captions.parquet", file=list(CAPTIONS), caption=list(CAPTIONS.values()))
    return root


@pytest.mark.parametrize("kind", ["txt", "json", "jsonl", "table", "parquet", "tar"])
def test_every_kind_of_captioned_images_gives_the_same_embedding_pairs(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_source(tmp_path / "in", kind), tmp_path / "out"
    assert linnet("data", "embed", source, "--out", out, "--shard-rows", "2", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["pairs"], reported["shards"], reported["left_out"]) == (5, 3, {})
    encoder = open_builtin()
    pairs = open_pairs(PairsConfig(source=str(out), validation_fraction=0, test_fraction=0), seed=0)
    batch = pairs.read_batch(np.arange(5), 5)
    pixels = np.stack([decode_pixels(content, 32) for content in IMAGES.values()])
    assert np.array_equal(batch.image_embed, encoder.embed_images(pixels))
    assert np.array_equal(batch.text_embed, encoder.embed_texts(list(CAPTIONS.values())))
    assert pairs.captions("train", range(5)) == list(CAPTIONS.values())
    assert pq.read_table(out / "metadata" / "metadata_2.parquet").column_names == ["image_path", "caption"]


def test_unusable_files_are_skipped_and_counted(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", "txt")
    (source / "b.txt").unlink()
    (source / "c.png").write_bytes(IMAGES["c.png"][:60])
    (source / "d.png").write_bytes(b"")
    notes = embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin()), tmp_path / "out")
    assert notes.left_out == {"no_caption": 1, "broken": 1, "empty": 1}
    assert notes.n_pairs == 2
    names = pq.read_table(tmp_path / "out" / "metadata" / "metadata_0.parquet").column("image_path").to_pylist()
    assert names == ["a.png", "e.png"]


def test_blocks_with_nothing_good_leave_no_gap_in_the_shards(tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", "txt")
    for name in ("c", "d"):
        (source / f"{name}.txt").unlink()
    notes = embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin(), shard_rows=2), tmp_path / "out")
    assert notes.blocks == (2, 0, 1)
    assert sorted(path.name for path in (tmp_path / "out" / "img_emb").iterdir()) == ["img_emb_0.npy", "img_emb_1.npy"]
    assert open_pairs(PairsConfig(source=str(tmp_path / "out"), batch_size=1), seed=0).warnings() == []


@pytest.mark.parametrize("n_before", [1, 2, 3, 4])
def test_killed_run_resumes_and_writes_the_same_files(tmp_path: Path, n_before: int) -> None:
    source = open_captioned(str(write_source(tmp_path / "in", "txt")))
    read: list[str] = []

    def samples(stop: int) -> Iterator[CaptionedImage]:
        for i, sample in enumerate(source.samples()):
            if i == stop:
                raise KeyboardInterrupt
            yield dataclasses.replace(sample, read_image=lambda s=sample: (read.append(s.name), s.read_image())[1])

    def task(stop: int) -> EmbedTask:
        return EmbedTask(
            source=dataclasses.replace(source, samples=lambda: samples(stop)),
            encoder=open_builtin(),
            encodings=EncodingSettings(length=3),
            shard_rows=2,
        )

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    embed(task(99), whole)
    with pytest.raises(KeyboardInterrupt):
        embed(task(n_before), broken)
    if (broken / "img_emb").exists():
        with pytest.raises(UserError, match="was not finished.*again: it resumes"):
            open_pairs(PairsConfig(source=str(broken)), seed=0)
    read.clear()
    embed(task(99), broken)
    assert read == [f"{name}.png" for name in "abcde"][n_before // 2 * 2 :], "what was done is not read again"
    assert _contents(broken) == _contents(whole)
    read.clear()
    assert embed(task(99), broken).n_pairs == 5
    assert read == []


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_folder_of_another_task_is_unchanged(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "in", "txt"), tmp_path / "out"
    embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin()), out)
    before = _contents(out)
    (source / "a.txt").write_text("another caption")
    with pytest.raises(UserError, match="a folder of the same task .*files was"):
        embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin()), out)
    with pytest.raises(UserError, match="shard_rows was 8192 and is 3"):
        embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin(), shard_rows=3), out)
    assert _contents(out) == before
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("hello")
    with pytest.raises(UserError, match="a new folder, or one that an earlier run"):
        embed(EmbedTask(source=open_captioned(str(source)), encoder=open_builtin()), mine)
    assert _contents(mine) == {"letter.txt": b"hello"}


def test_embedded_images_with_captions_get_their_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = files.folder(tmp_path / "in"), tmp_path / "out"
    for path in (source / "text_emb").iterdir():
        path.unlink()
    before = _contents(source)
    assert linnet("data", "embed", source, "--out", out) == 0
    assert "23 pairs in 3 shards" in capsys.readouterr().out
    pairs = open_pairs(PairsConfig(source=str(out), batch_size=4), seed=0)
    batch = pairs.read_batch(np.arange(files.N), files.N)
    assert np.array_equal(batch.image_embed, files.vectors())
    assert np.array_equal(batch.text_embed, open_builtin().embed_texts(files.captions()))
    assert _contents(source) == before
    again = _contents(out)
    notes: Any = read_manifest(out)
    dataclasses.replace(notes, blocks=notes.blocks[:1], finished=False).save(out)
    (out / "text_emb" / "text_emb_2.npy").unlink()
    assert linnet("data", "embed", source, "--out", out) == 0
    assert _contents(out) == again
    assert linnet("data", "embed", source / "img_emb", "--metadata", source / "metadata", "--out", tmp_path / "b") == 0
    assert {name: data for name, data in _contents(tmp_path / "b").items() if name != MANIFEST} == {
        name: data for name, data in again.items() if name != MANIFEST
    }
    assert linnet("data", "embed", source, "--out", source) == 2
    assert "a folder other than SOURCE" in capsys.readouterr().err


def test_encoder_that_is_not_there_is_rejected_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(tmp_path / "in", "txt")
    for encoder, words in (
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "install linnet-lm[clip], or use --encoder builtin"),
        ("clop", "builtin or open_clip:MODEL/WEIGHTS"),
    ):
        assert linnet("data", "embed", source, "--out", tmp_path / "out", "--encoder", encoder) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("captions.json", b"{", "captions.json is not JSON"),
        ("captions.json", b'[{"file_name": "a.png"}]', "entry 0 does not name an image and its caption"),
        ("captions.jsonl", b'{"caption": "x"}', "entry 0 does not name an image and its caption"),
        ("more.tar", b"", r"one of them \(it has pictures and tar\)"),
    ],
)
def test_captions_that_cannot_be_read_are_rejected(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    source = write_source(tmp_path / "in", "none")
    (source / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        open_captioned(str(source))


def test_images_without_any_caption_are_rejected(tmp_path: Path) -> None:
    source = open_captioned(str(write_source(tmp_path / "in", "none")))
    with pytest.raises(UserError, match="left out: 5 no caption"):
        embed(EmbedTask(source=source, encoder=open_builtin()), tmp_path / "out")


def test_corrupt_notes_are_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match=f"{MANIFEST} is damaged"):
        read_manifest(tmp_path)
    EmbedManifest(task={}).save(tmp_path)
    assert read_manifest(tmp_path) == EmbedManifest(task={})
