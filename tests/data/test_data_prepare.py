"""Preparing data: every token and image once, the same from any attempt and any number of workers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_data import SHARES, ListSource, many, opened, task_of

from linnet.config.schema import DataConfig
from linnet.core.errors import UserError
from linnet.core.special_tokens import EOS, FIRST_BYTE
from linnet.data import TokenDataset, load_dataset
from linnet.data import index as indexes
from linnet.data.images import to_png
from linnet.data.index import Index
from linnet.data.prepare import chunks as chunks_module
from linnet.data.prepare import pipeline as prepare_module
from linnet.data.prepare.chunks import SplitFractions
from linnet.data.prepare.pipeline import PrepareConfig, prepare
from linnet.data.prepare.shards import count_words
from linnet.data.sources.documents import open_documents
from linnet.data.sources.images import open_images
from linnet.data.splits import SPLITS


def tokens_of(data: TokenDataset, name: str) -> list[tuple[int, int]]:
    """(token, document) of all windows of a split."""
    split = data.split(name)
    windows = [split.window(i) for i in range(split.n_windows)]
    return [
        (int(token), int(document))
        for window in windows
        for token, document, counts in zip(*window, strict=True)
        if counts
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


documents_in_parts = st.lists(
    st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=4), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=60)
@given(docs=documents_in_parts, chunk=st.integers(1, 40), ends=st.booleans(), single=st.booleans())
def test_every_token_of_every_document_comes_out_once(
    tmp_path_factory: pytest.TempPathFactory, docs: list[list[bytes]], chunk: int, ends: bool, single: bool
) -> None:
    single = single or len(docs) == 1
    docs = docs[:1] if single else [[b"for training"], *docs]
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_module, "CHUNK_BYTES", chunk)
        index = prepare(task_of(ListSource(docs, ends_with_eos=ends, is_single=single)), out / "data")
    data = opened(out / "data")
    full = [b"".join(parts) for parts in docs]
    assert not single or index.held_out == "the tail of the stream"
    if index.held_out == "the tail of the stream":
        # Too few documents for a hash follow each other as the hash had divided them; one text stays as it is.
        order = sorted(range(len(docs)), key=lambda i: SPLITS.index(SHARES.assign(f"doc{i}")))
        content = b"".join(data.raw(name) for name in SPLITS)
        assert content == b"".join(full[i] for i in order)
        n_end = sum(token == EOS for name in SPLITS for token, _ in tokens_of(data, name))
        assert n_end == (len(docs) if ends else 0)
    else:
        found = [document for name in SPLITS for document in documents_of(data, name, ends)]
        assert sorted(found) == sorted(full)
    assert sum(split.bytes for split in index.splits.values()) == sum(map(len, full))
    assert indexes.find_problems(out / "data", index, checksums=True) == []


def documents_of(data: TokenDataset, name: str, ends: bool) -> list[bytes]:
    found: dict[int, list[int]] = {}
    for token, document in tokens_of(data, name):
        found.setdefault(document, []).append(token)
    texts = [bytes(token - FIRST_BYTE for token in tokens if token != EOS) for tokens in found.values()]
    assert all((tokens[-1] == EOS) == ends and tokens.count(EOS) == ends for tokens in found.values())
    return texts


def test_hash_of_the_name_divides_and_adding_documents_moves_none() -> None:
    shares = SplitFractions(validation=0.1, test=0.2)
    drawn = Counter(shares.assign(f"file{i}") for i in range(5000))
    assert abs(drawn["test"] - 1000) < 120
    assert abs(drawn["validation"] - 500) < 90
    assert shares.assign("file7") == SplitFractions(validation=0.1, test=0.2).assign("file7")


def test_one_text_is_divided_by_its_tail_as_unprepared_text_is(tmp_path: Path) -> None:
    text = bytes(range(32, 127)) * 40
    (tmp_path / "a.txt").write_bytes(text)
    index = prepare(task_of(open_documents(str(tmp_path / "a.txt"))), tmp_path / "out")
    data = opened(tmp_path / "out", 50)
    cfg = DataConfig(
        source=str(tmp_path / "a.txt"), validation_fraction=0.2, test_fraction=0.2, sequence_len=50, update_len=50
    )
    plain = load_dataset(dataclasses.replace(cfg, batch_size=2), 1)
    for name in SPLITS:
        assert data.raw(name) == plain.raw(name)
        assert tokens_of(data, name) == tokens_of(plain, name)
    np.testing.assert_array_equal(data.batch(3).inputs, plain.batch(3).inputs)
    assert sum(split.words or 0 for split in index.splits.values()) >= len(text.split())


def test_sources_own_splits_are_kept_even_when_one_is_empty(tmp_path: Path) -> None:
    source = ListSource([[b"one"], [b"two"], [b"three"]], splits=("train", "test", "train"))
    index = prepare(task_of(source), tmp_path / "out")
    data = opened(tmp_path / "out")
    assert data.raw("train") == b"onethree"
    assert data.raw("test") == b"two"
    assert data.raw("validation") == b""
    assert index.held_out == "the source's own splits"


def test_killed_preparation_resumes_to_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", 200)
    source = ListSource(many(60))
    prepare(task_of(source), tmp_path / "straight")
    real, calls = prepare_module.write_shard, 0

    def dies(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(prepare_module, "write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare(task_of(source), tmp_path / "killed")
    assert not indexes.is_prepared(tmp_path / "killed")
    with pytest.raises(UserError, match=r"was not finished.*data prepare"):
        opened(tmp_path / "killed")
    done = {p.name: p.stat().st_ino for p in (tmp_path / "killed").glob("*.bin")}
    assert len(done) == 5
    prepare(task_of(source), tmp_path / "killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "straight")
    assert {name: (tmp_path / "killed" / name).stat().st_ino for name in done} == done, (
        "what was done is not done again"
    )
    n_before = calls
    prepare(task_of(source), tmp_path / "killed")
    assert calls == n_before, "the same again changes nothing"


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", 600)
    source = ListSource(many(60))
    prepare(task_of(source), tmp_path / "one", workers=1)
    prepare(task_of(source), tmp_path / "two", workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_another_source_or_option_is_rejected_in_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ListSource(many(5))
    prepare(task_of(source), tmp_path / "done")
    with pytest.raises(UserError, match="without other prepared data"):
        prepare(task_of(ListSource(many(6))), tmp_path / "done")
    monkeypatch.setattr(prepare_module, "write_shard", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(task_of(source), tmp_path / "begun")
    with pytest.raises(UserError, match="unfinished preparation of another task"):
        prepare(task_of(source, fractions=SplitFractions(validation=0.1, test=0.1)), tmp_path / "begun")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="a new or empty folder"):
        prepare(task_of(source), tmp_path / "mine")


def test_empty_source_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to train on"):
        prepare(task_of(ListSource([])), tmp_path / "out")


@settings(deadline=None)
@given(parts=st.lists(st.text("ab \n\t", max_size=12), max_size=6))
def test_word_counts_are_those_of_the_joined_text(parts: list[str]) -> None:
    data, inside, count = [part.encode() for part in parts], False, 0
    for part in data:
        count += count_words(part, inside)
        inside = bool(part) and not part[-1:].isspace() if part else inside
    assert count == len(b"".join(data).split())


def pictures_in(folder: Path, n: int) -> np.ndarray:
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 3), np.uint8)
    for i, image in enumerate(values):
        (folder / f"{i:03d}.png").write_bytes(to_png(image))
    return values


def picture_task(folder: Path, **changes: Any) -> PrepareConfig:
    return task_of(open_images(str(folder)), size=4, **changes)


def test_images_are_one_per_sequence(tmp_path: Path) -> None:
    values = pictures_in(tmp_path / "in", 30)
    index: Index = prepare(picture_task(tmp_path / "in"), tmp_path / "out")
    data = opened(tmp_path / "out", 48)
    assert index.shape == [4, 4, 3]
    assert data.shape == (4, 4, 3)
    found = [
        data.split(name).window(i).targets - FIRST_BYTE for name in SPLITS for i in range(data.split(name).n_windows)
    ]
    assert sorted(map(bytes, np.array(found, np.uint8))) == sorted(map(bytes, values.reshape(30, 48)))
    with pytest.raises(UserError, match=r"data.sequence_len.*--data.sequence-len 48"):
        opened(tmp_path / "out", 24)


def test_few_images_are_never_split_by_the_tail(tmp_path: Path) -> None:
    pictures_in(tmp_path / "in", 7)
    prepare(picture_task(tmp_path / "in", fractions=SplitFractions(validation=0.15, test=0.15)), tmp_path / "out")
    data = opened(tmp_path / "out", 48)
    assert [data.split(name).n_tokens % 48 for name in SPLITS] == [0, 0, 0]
    assert sum(data.split(name).n_documents for name in SPLITS) == 7


def test_corrupt_images_are_counted_and_rejected_above_the_limit(tmp_path: Path) -> None:
    values = pictures_in(tmp_path / "in", 30)
    (tmp_path / "in" / "010.png").write_bytes(to_png(values[10])[:40])
    with pytest.raises(UserError, match=r"1 of 30 images are broken.*010.png.*--max-broken"):
        prepare(picture_task(tmp_path / "in"), tmp_path / "out")
    index = prepare(picture_task(tmp_path / "in", max_broken=0.05), tmp_path / "out")
    assert sum(split.n_documents for split in index.splits.values()) == 29
    assert sum(index.left_out.values()) == 1
