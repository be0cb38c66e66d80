"""Prepared data: damage is found, what does not fit is rejected, and hosts together read the same batch."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_data import ListSource, many, opened, task_of

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.data import index as indexes
from linnet.data import load_dataset
from linnet.data.prepare.pipeline import prepare
from linnet.data.shuffle import host_slice
from linnet.data.splits import SPLITS


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "data"
    prepare(task_of(ListSource(many(40))), folder)
    return folder


def copied(good: Path, to: Path) -> Path:
    to.mkdir()
    for path in good.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_flipped_byte_is_found(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    shard = folder / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert len(indexes.find_problems(folder, indexes.load(folder), checksums=True)) == 1
    with pytest.raises(UserError, match=r"train-00000.bin was modified"):
        opened(folder)


def test_short_or_missing_shard_is_found_however_large_the_data(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "MAX_CHECKED_BYTES", 0)
    folder = copied(good, tmp_path / "data")
    shard = folder / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="should have"):
        opened(folder)
    shard.unlink()
    with pytest.raises(UserError, match="is missing"):
        opened(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: {**index, "version": 99}, "version 99"),
        (lambda index: {**index, "format": "other"}, "not an index"),
        (lambda index: {key: value for key, value in index.items() if key != "dtype"}, "damaged"),
        (lambda index: [], "not an index"),
    ],
)
def test_index_from_elsewhere_is_rejected(good: Path, tmp_path: Path, change: Any, words: str) -> None:
    folder = copied(good, tmp_path / "data")
    path = folder / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=words):
        opened(folder)


def test_tables_that_do_not_add_up_are_found(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    (folder / "train.documents.npy").write_bytes((folder / "test.documents.npy").read_bytes())
    assert any("modified" in words for words in indexes.find_problems(folder, indexes.load(folder), checksums=True))


def test_another_tokenizer_beside_the_data_is_rejected(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["tokenizer"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="not the one this data was made with"):
        opened(folder)


def test_options_of_unprepared_text_are_rejected(good: Path) -> None:
    with pytest.raises(UserError, match="was split when it was prepared"):
        load_dataset(DataConfig(source=str(good), validation_fraction=0.2), 0)
    with pytest.raises(UserError, match="data.validation_files"):
        load_dataset(DataConfig(source=str(good), validation_files=("x",)), 0)


def test_unprepared_benchmark_dataset_names_the_command() -> None:
    with pytest.raises(UserError, match=r"linnet data prepare enwik8 --out enwik8"):
        load_dataset(DataConfig(source="enwik8"), 0)


@settings(deadline=None)
@given(n_rows=st.integers(1, 40), n_hosts=st.integers(1, 50))
def test_hosts_share_every_row_once(n_rows: int, n_hosts: int) -> None:
    rows = [list(host_slice(n_rows, host, n_hosts)) for host in range(n_hosts)]
    assert list(itertools.chain.from_iterable(rows)) == list(range(n_rows))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@settings(deadline=None, max_examples=25)
@given(step=st.integers(0, 30), n_hosts=st.integers(1, 6))
def test_hosts_together_read_the_same_batch(good: Path, step: int, n_hosts: int) -> None:
    data = opened(good, 16, 6)
    full = data.batch(step)
    shares = [data.batch(step, host, n_hosts) for host in range(n_hosts)]
    for name in ("inputs", "targets", "doc_ids", "loss_mask"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in shares]), getattr(full, name))


def test_embedded_emoji_open_as_images() -> None:
    data = load_dataset(DataConfig(source="emoji-16", sequence_len=768, update_len=768, batch_size=2), 0)
    assert sum(data.split(name).n_documents for name in SPLITS) == 3786
    assert data.batch(0).targets.shape == (2, math.prod((16, 16, 3)))
    assert data.batch(0).loss_mask.min() == 1
    with pytest.raises(UserError, match="--data.sequence-len 3072"):
        load_dataset(DataConfig(source="emoji-32", sequence_len=768, update_len=768), 0)
