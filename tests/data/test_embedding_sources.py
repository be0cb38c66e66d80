"""Pairs of embeddings from every layout: the same rows, in the same order, with their captions and splits."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import embedding_files as files
import numpy as np
import pytest

from linnet.core.errors import UserError
from linnet.data import shuffle
from linnet.data.embeddings import EmbeddingPairs, PairsConfig, open_pairs
from linnet.data.embeddings import validation as scans


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "linnet"


def opened(source: Path | str, *, encodings: bool = False, **settings: Any) -> EmbeddingPairs:
    cfg = PairsConfig(**({"source": str(source), "batch_size": 4} | settings))
    return open_pairs(cfg, seed=3, encodings=encodings)


def all_rows(pairs: EmbeddingPairs) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
    """In the source's order, which is that of the splits one after another."""
    batch = pairs.read_batch(np.arange(pairs.images.n_rows), pairs.images.n_rows)
    names = [pairs.captions(split, range(pairs.n_rows(split))) for split in ("train", "validation", "test")]
    flat = [caption for group in names if group is not None for caption in group]
    return np.asarray(batch.text_embed), np.asarray(batch.image_embed), flat or None


def layouts(root: Path) -> dict[str, dict[str, Any]]:
    files.folder(root / "npy")
    files.parquet(
        root / "one.parquet", image_embedding=files.vectors(), text_embedding=files.texts(), caption=files.captions()
    )
    for name, start, stop in (("wds/9.tar", 0, 9), ("wds/10.tar", 9, files.N)):
        files.tar(root / name, files.samples(start, stop))
    np.savez_compressed(
        root / "one.npz", image_embed=files.vectors(), text_embed=files.texts(), caption=np.array(files.captions())
    )
    return {
        "folder": {"source": str(root / "npy")},
        "named": {
            "images": str(root / "npy" / "img_emb"),
            "texts": str(root / "npy" / "text_emb" / "*.npy"),
            "metadata": str(root / "npy" / "metadata"),
        },
        "parquet": {"source": str(root / "one.parquet")},
        "webdataset": {"source": str(root / "wds")},
        "npz": {"source": str(root / "one.npz")},
    }


@pytest.mark.parametrize("layout", ["folder", "named", "parquet", "webdataset", "npz"])
def test_every_layout_gives_the_same_pairs(tmp_path: Path, layout: str) -> None:
    pairs = open_pairs(PairsConfig(**layouts(tmp_path)[layout]), seed=0)
    text, image, captions = all_rows(pairs)
    assert np.array_equal(text, files.texts())
    expected = files.vectors()
    assert np.array_equal(image, expected.astype(np.float16) if layout == "webdataset" else expected)
    assert captions == files.captions()
    assert (pairs.text_width, pairs.image_width, pairs.text_len) == (files.TEXT, files.IMAGE, None)
    assert pairs.warnings() == ["There are 21 pairs to train on, fewer than one batch of 64: an update sees pairs more than once. "
                                "A smaller --data.batch-size is better."]  # fmt: skip


def test_shards_are_matched_by_their_numbers_and_not_by_their_names(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    (root / "text_emb" / "text_emb_8.npy").rename(root / "text_emb" / "z_0008.npy")
    assert np.array_equal(all_rows(opened(root))[0], files.texts())


def test_captions_are_found_by_any_row_in_any_order(tmp_path: Path) -> None:
    for settings in layouts(tmp_path).values():
        pairs = open_pairs(PairsConfig(**settings), seed=0)
        assert pairs.captions("train", [20, 0, 13, 13]) == ["caption 20", "caption 0", "caption 13", "caption 13"]


def test_source_without_captions_has_none(tmp_path: Path) -> None:
    assert opened(files.folder(tmp_path / "in", metadata=False)).captions("train", [0]) is None


def test_half_precision_is_read_exactly_and_returned_as_float32(tmp_path: Path) -> None:
    batch = opened(files.folder(tmp_path / "in", dtype=np.float16)).read_batch(np.arange(3), 3)
    assert batch.image_embed.dtype == np.float32
    assert np.array_equal(batch.image_embed, files.vectors()[:3].astype(np.float16))


def test_text_encodings_are_included_and_may_be_zero_padded(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in", sizes=(files.N,))
    encodings = np.random.default_rng(0).normal(size=(files.N, 6, files.TEXT)).astype(np.float32)
    encodings[:, 4:] = 0
    encodings[2] = 0
    (root / "text_encodings").mkdir()
    np.save(root / "text_encodings" / "text_encodings_8.npy", encodings)
    assert opened(root, mix=0.5).text_len is None, "only a model that is conditioned on them reads them"
    with pytest.raises(UserError, match=r"data.mix is 0.5, .* 0 with model.text_encodings"):
        opened(root, encodings=True, mix=0.5)
    pairs = opened(root, encodings=True)
    assert pairs.text_len == 6
    assert pairs.n_rows("train") == 21, "a text that is all padding is no fault"
    batch = pairs.read_batch(np.array([5, 2]), 3)
    assert batch.encodings is not None
    assert np.array_equal(batch.encodings, np.stack([encodings[5], encodings[2], np.zeros_like(encodings[0])]))


def test_weights_are_loaded_tensor_by_tensor(tmp_path: Path) -> None:
    """Shards stay maps of their files: rows are read when they are asked for."""
    for name, settings in layouts(tmp_path).items():
        pairs = open_pairs(PairsConfig(**settings), seed=0)
        for shard in (*pairs.images.shards, *pairs.texts.shards):
            mapped: Any = shard
            assert hasattr(mapped, "mapped") or isinstance(mapped.array, np.memmap), name


# Order, hosts, splits


def test_batch_is_a_function_of_the_step_and_an_epoch_has_every_pair_once(tmp_path: Path) -> None:
    pairs = opened(files.folder(tmp_path / "in"), batch_size=7)
    n = pairs.n_rows("train")
    assert n == 21
    seen = np.concatenate([pairs.batch(step).image_embed for step in range(3)])
    wanted = files.vectors()[shuffle.window_indices(3, 0, 21, n)]
    assert np.array_equal(seen, wanted)
    assert len(np.unique(seen, axis=0)) == n
    later = pairs.batch(5).image_embed
    again = opened(tmp_path / "in", batch_size=7)
    assert np.array_equal(again.batch(5).image_embed, later), "a fresh process continues where another stopped"
    assert not np.array_equal(pairs.batch(0).image_embed, pairs.batch(3).image_embed), "each epoch has its own order"


@pytest.mark.parametrize("n_hosts", [2, 3])
def test_hosts_together_read_the_same_batch(tmp_path: Path, n_hosts: int) -> None:
    pairs = opened(files.folder(tmp_path / "in"), batch_size=8)
    full = pairs.batch(4)
    parts = [pairs.batch(4, host, n_hosts) for host in range(n_hosts)]
    for name in ("text_embed", "image_embed", "mask"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(full, name))


def test_evaluation_has_every_pair_once_and_masks_padding(tmp_path: Path) -> None:
    pairs = opened(files.folder(tmp_path / "in"), test_fraction=0.3)
    batches = list(pairs.evaluation("test", 4))
    assert [batch.mask.tolist() for batch in batches] == [[1, 1, 1, 1], [1, 1, 0, 0]]
    rows = np.concatenate([batch.text_embed for batch in batches])
    assert np.array_equal(rows[:6], files.texts()[-6:])
    assert not rows[6:].any()
    limited = next(iter(pairs.evaluation("test", 3, limit=3)))
    assert np.array_equal(limited.text_embed, files.texts()[[17, 19, 21]])


def test_splits_by_fraction_keep_the_order(tmp_path: Path) -> None:
    pairs = opened(files.folder(tmp_path / "in"), validation_fraction=0.2, test_fraction=0.1)
    assert pairs.split("train").tolist() == list(range(17))
    assert pairs.split("validation").tolist() == [17, 18, 19, 20]
    assert pairs.split("test").tolist() == [21, 22]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_source_may_name_its_test_split(tmp_path: Path, kind: str) -> None:
    is_test = np.arange(files.N) % 3 == 0
    columns = {"image_embed": files.vectors(), "text_embed": files.texts(), "is_test": is_test}
    path = tmp_path / f"one.{kind}"
    if kind == "npz":
        np.savez(path, **columns)
    else:
        files.parquet(path, **columns)
    pairs = opened(path, split_key="is_test", validation_fraction=0.2)
    rest = np.flatnonzero(~is_test)
    assert pairs.split("test").tolist() == np.flatnonzero(is_test).tolist()
    assert pairs.split("train").tolist() == rest[:12].tolist()
    assert pairs.split("validation").tolist() == rest[12:].tolist()


def test_source_may_name_its_splits_in_words(tmp_path: Path) -> None:
    words = ["train", "val", "test"] * 7 + ["train", "Train"]
    path = files.parquet(tmp_path / "a.parquet", image_emb=files.vectors(), text_emb=files.texts(), split=words)
    pairs = opened(path, split_key="split")
    assert [pairs.n_rows(name) for name in ("train", "validation", "test")] == [9, 7, 7]
    words[4] = "training"
    files.parquet(path, image_emb=files.vectors(), text_emb=files.texts(), split=words)
    with pytest.raises(UserError, match=r"split in row 4 .*'training'.*one of train, validation"):
        opened(path, split_key="split")


# Once read, known


def test_dataset_is_validated_once_until_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = files.folder(tmp_path / "in")
    first = opened(root)
    looked: list[Path] = []
    look = scans._scan_shard
    monkeypatch.setattr(scans, "_scan_shard", lambda shard: (looked.append(shard.path), look(shard))[1])
    assert opened(root).fingerprint == first.fingerprint
    assert looked == []
    changed = root / "img_emb" / "img_emb_9.npy"
    image = files.vectors(9, seed=5)
    image[3, 0] = np.nan
    np.save(changed, image)
    os.utime(changed, ns=(1, 1))
    second = opened(root)
    assert looked == [changed]
    assert second.fingerprint != first.fingerprint
    assert second.n_rows("train") + second.n_rows("validation") + second.n_rows("test") == files.N - 1
    shutil.rmtree(cache)
    assert opened(root).fingerprint == second.fingerprint, "the cache is nothing but a saving"


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_unpacked_files_are_refreshed_when_the_archive_changes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"one.{kind}"
    for seed in (0, 1):
        image = files.vectors(seed=seed)
        if kind == "npz":
            np.savez(path, image_embed=image, text_embed=files.texts())
        else:
            files.parquet(path, image_embed=image, text_embed=files.texts())
        os.utime(path, ns=(seed, seed))
        assert np.array_equal(all_rows(opened(path))[1], image)


def test_unwritable_home_is_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert opened(files.folder(tmp_path / "in")).n_rows("train") == 21


def test_fingerprint_covers_content_and_splits_but_not_the_batch_size(tmp_path: Path) -> None:
    root = files.folder(tmp_path / "in")
    first = opened(root)
    assert opened(root, batch_size=9).fingerprint == first.fingerprint
    assert opened(root, test_fraction=0.2).fingerprint != first.fingerprint
    described = first.describe()
    assert described["splits"] == {"train": {"pairs": 21}, "validation": {"pairs": 1}, "test": {"pairs": 1}}
    assert described["fingerprint"] == first.fingerprint
    assert dataclasses.asdict(first.cfg)["source"] == described["source"]
