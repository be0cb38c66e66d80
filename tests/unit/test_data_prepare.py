"""Preparing data: every token once, the same from any attempt and any number of workers, and damage is found."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from linnet.config import DataConfig
from linnet.data import Data, open_data
from linnet.data import chunks as chunks_module
from linnet.data import index as indexes
from linnet.data import prepare as prepare_module
from linnet.data.chunks import Shares
from linnet.data.documents import Part, open_documents
from linnet.data.encode import count_words
from linnet.data.index import Index
from linnet.data.order import share
from linnet.data.pictures import open_pictures
from linnet.data.prepare import Task, prepare
from linnet.data.tokenizer import open_tokenizer
from linnet.errors import UserError
from linnet.tokens import END, FIRST_BYTE

SHARES = Shares(validation=0.2, test=0.2)


@dataclasses.dataclass
class Listed:
    """A source made of a list: documents, each in parts."""

    documents: list[list[bytes]]
    ends: bool = True
    single: bool = False
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.n_bytes = 1

    def identity(self) -> dict[str, Any]:
        return {"documents": [[part.hex() for part in parts] for parts in self.documents]}

    def parts(self) -> Iterator[Part]:
        for i, parts in enumerate(self.documents):
            for j, data in enumerate(parts):
                split = self.splits[i] if self.splits else None
                yield Part(f"doc{i}", data, j == 0, j == len(parts) - 1, split, 0)


def task_of(source: Any, **changes: Any) -> Task:
    task = Task(source=source, tokenizer=open_tokenizer("bytes"), shares=SHARES, size=None, max_broken=0.01)
    return dataclasses.replace(task, **changes)


def opened(folder: Path, sequence_len: int = 8, batch_size: int = 2) -> Data:
    cfg = DataConfig(source=str(folder), sequence_len=sequence_len, update_len=sequence_len, batch_size=batch_size)
    return open_data(cfg, 1)


def tokens_of(data: Data, name: str) -> list[tuple[int, int]]:
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
    docs = docs[:1] if single else docs
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_module, "CHUNK_BYTES", chunk)
        source = Listed([[b"for training"], *docs], ends=ends, single=single, splits=())
        source = Listed(docs, ends=ends, single=True) if single else source
        index = prepare(task_of(source), out / "data")
    docs = source.documents
    data = opened(out / "data")
    whole = [b"".join(parts) for parts in docs]
    if index.held_out == "the tail of the stream":
        order = whole if single else sorted(whole, key=lambda d: 0)
        content = b"".join(data.raw(name) for name in ("train", "validation", "test"))
        assert sorted(content) == sorted(b"".join(order))
        n_end = sum(token == END for name in indexes_names() for token, _ in tokens_of(data, name))
        assert n_end == (len(docs) if ends else 0)
    else:
        found = [document for name in indexes_names() for document in documents_of(data, name, ends)]
        assert sorted(found) == sorted(whole)
    assert sum(split.bytes for split in index.splits.values()) == sum(map(len, whole))
    assert indexes.problems(out / "data", index, checksums=True) == []


def indexes_names() -> tuple[str, ...]:
    return ("train", "validation", "test")


def documents_of(data: Data, name: str, ends: bool) -> list[bytes]:
    found: dict[int, list[int]] = {}
    for token, document in tokens_of(data, name):
        found.setdefault(document, []).append(token)
    texts = [bytes(token - FIRST_BYTE for token in tokens if token != END) for tokens in found.values()]
    assert all((tokens[-1] == END) == ends and tokens.count(END) == ends for tokens in found.values())
    return texts


def test_a_hash_of_the_name_divides_and_adding_documents_moves_none() -> None:
    shares = Shares(validation=0.1, test=0.2)
    drawn = Counter(shares.of(f"file{i}") for i in range(5000))
    assert abs(drawn["test"] - 1000) < 120
    assert abs(drawn["validation"] - 500) < 90
    assert shares.of("file7") == Shares(validation=0.1, test=0.2).of("file7")


def test_one_text_is_divided_by_its_tail_as_unprepared_text_is(tmp_path: Path) -> None:
    text = bytes(range(32, 127)) * 40
    (tmp_path / "a.txt").write_bytes(text)
    index = prepare(task_of(open_documents(str(tmp_path / "a.txt"))), tmp_path / "out")
    data = opened(tmp_path / "out", 50)
    cfg = DataConfig(
        source=str(tmp_path / "a.txt"), validation_fraction=0.2, test_fraction=0.2, sequence_len=50, update_len=50
    )
    plain = open_data(dataclasses.replace(cfg, batch_size=2), 1)
    for name in indexes_names():
        assert data.raw(name) == plain.raw(name)
        assert tokens_of(data, name) == tokens_of(plain, name)
    np.testing.assert_array_equal(data.batch(3).inputs, plain.batch(3).inputs)
    assert sum(split.words or 0 for split in index.splits.values()) >= len(text.split())


def test_the_sources_own_splits_are_kept_even_when_one_is_empty(tmp_path: Path) -> None:
    source = Listed([[b"one"], [b"two"], [b"three"]], splits=("train", "test", "train"))
    index = prepare(task_of(source), tmp_path / "out")
    data = opened(tmp_path / "out")
    assert data.raw("train") == b"onethree"
    assert data.raw("test") == b"two"
    assert data.raw("validation") == b""
    assert index.held_out == "the source's own splits"


def many(n: int) -> list[list[bytes]]:
    rng = np.random.default_rng(0)
    return [[bytes(rng.integers(32, 127, int(rng.integers(5, 90)), np.uint8))] for _ in range(n)]


def test_a_killed_preparation_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", 200)
    source = Listed(many(60))
    prepare(task_of(source), tmp_path / "straight")
    real, calls = prepare_module.encode_chunk, 0

    def dies(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(prepare_module, "encode_chunk", dies)
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
    source = Listed(many(60))
    prepare(task_of(source), tmp_path / "one", workers=1)
    prepare(task_of(source), tmp_path / "two", workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_another_source_or_option_is_refused_in_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Listed(many(5))
    prepare(task_of(source), tmp_path / "done")
    with pytest.raises(UserError, match="without other prepared data"):
        prepare(task_of(Listed(many(6))), tmp_path / "done")
    monkeypatch.setattr(prepare_module, "encode_chunk", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(task_of(source), tmp_path / "begun")
    with pytest.raises(UserError, match="unfinished preparation of something else"):
        prepare(task_of(source, shares=Shares(validation=0.1, test=0.1)), tmp_path / "begun")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="a new or empty folder"):
        prepare(task_of(source), tmp_path / "mine")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "data"
    prepare(task_of(Listed(many(40))), folder)
    return folder


def copied(good: Path, to: Path) -> Path:
    to.mkdir()
    for path in good.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_flipped_byte_is_found(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    shard = folder / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert len(indexes.problems(folder, indexes.load(folder), checksums=True)) == 1
    with pytest.raises(UserError, match=r"train-00000.bin was altered"):
        opened(folder)


def test_a_short_or_missing_shard_is_found_however_large_the_data(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "CHECKED_AT_OPENING", 0)
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
def test_an_index_from_elsewhere_is_refused(good: Path, tmp_path: Path, change: Any, words: str) -> None:
    folder = copied(good, tmp_path / "data")
    path = folder / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=words):
        opened(folder)


def test_tables_that_do_not_add_up_are_found(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    (folder / "train.documents.npy").write_bytes((folder / "test.documents.npy").read_bytes())
    assert any("altered" in words for words in indexes.problems(folder, indexes.load(folder), checksums=True))


def test_another_tokenizer_beside_the_data_is_refused(good: Path, tmp_path: Path) -> None:
    folder = copied(good, tmp_path / "data")
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["tokenizer"]["fingerprint"] = "0" * 64
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="not the one this data was made with"):
        opened(folder)


def test_options_of_unprepared_text_are_refused(good: Path) -> None:
    with pytest.raises(UserError, match="was divided when it was prepared"):
        open_data(DataConfig(source=str(good), validation_fraction=0.2), 0)
    with pytest.raises(UserError, match="data.validation_files"):
        open_data(DataConfig(source=str(good), validation_files=("x",)), 0)


def test_a_named_set_that_is_not_prepared_says_how() -> None:
    with pytest.raises(UserError, match=r"linnet data prepare enwik8 --out enwik8"):
        open_data(DataConfig(source="enwik8"), 0)


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to train on"):
        prepare(task_of(Listed([])), tmp_path / "out")


@settings(deadline=None)
@given(parts=st.lists(st.text("ab \n\t", max_size=12), max_size=6))
def test_words_are_those_of_the_joined_text(parts: list[str]) -> None:
    data, inside, count = [part.encode() for part in parts], False, 0
    for part in data:
        count += count_words(part, inside)
        inside = bool(part) and not part[-1:].isspace() if part else inside
    assert count == len(b"".join(data).split())


@settings(deadline=None)
@given(n_rows=st.integers(1, 40), n_hosts=st.integers(1, 50))
def test_hosts_share_every_row_once(n_rows: int, n_hosts: int) -> None:
    rows = [list(share(n_rows, host, n_hosts)) for host in range(n_hosts)]
    assert list(itertools.chain.from_iterable(rows)) == list(range(n_rows))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@settings(deadline=None, max_examples=25)
@given(step=st.integers(0, 30), n_hosts=st.integers(1, 6))
def test_hosts_together_read_the_same_batch(good: Path, step: int, n_hosts: int) -> None:
    data = opened(good, 16, 6)
    whole = data.batch(step)
    shares = [data.batch(step, host, n_hosts) for host in range(n_hosts)]
    for name in ("inputs", "targets", "doc_ids", "loss_mask"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in shares]), getattr(whole, name))


def png(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def pictures_in(folder: Path, n: int) -> np.ndarray:
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 3), np.uint8)
    for i, picture in enumerate(values):
        (folder / f"{i:03d}.png").write_bytes(png(picture))
    return values


def picture_task(folder: Path, **changes: Any) -> Task:
    return task_of(open_pictures(str(folder)), size=4, **changes)


def test_pictures_are_one_a_sequence(tmp_path: Path) -> None:
    values = pictures_in(tmp_path / "in", 30)
    index: Index = prepare(picture_task(tmp_path / "in"), tmp_path / "out")
    data = opened(tmp_path / "out", 48)
    assert index.shape == [4, 4, 3]
    assert data.shape == (4, 4, 3)
    found = [
        data.split(name).window(i).targets - FIRST_BYTE
        for name in indexes_names()
        for i in range(data.split(name).n_windows)
    ]
    assert sorted(map(bytes, np.array(found, np.uint8))) == sorted(map(bytes, values.reshape(30, 48)))
    with pytest.raises(UserError, match=r"data.sequence_len.*--data.sequence-len 48"):
        opened(tmp_path / "out", 24)


def test_few_pictures_are_never_cut_by_the_tail(tmp_path: Path) -> None:
    pictures_in(tmp_path / "in", 7)
    prepare(picture_task(tmp_path / "in", shares=Shares(validation=0.15, test=0.15)), tmp_path / "out")
    data = opened(tmp_path / "out", 48)
    assert [data.split(name).n_tokens % 48 for name in indexes_names()] == [0, 0, 0]
    assert sum(data.split(name).n_documents for name in indexes_names()) == 7


def test_broken_pictures_are_counted_and_refused_above_the_limit(tmp_path: Path) -> None:
    values = pictures_in(tmp_path / "in", 30)
    (tmp_path / "in" / "010.png").write_bytes(png(values[10])[:40])
    with pytest.raises(UserError, match=r"1 of 30 pictures are broken.*010.png.*--max-broken"):
        prepare(picture_task(tmp_path / "in"), tmp_path / "out")
    index = prepare(picture_task(tmp_path / "in", max_broken=0.05), tmp_path / "out")
    assert sum(split.n_documents for split in index.splits.values()) == 29
    assert sum(index.left_out.values()) == 1


def test_the_embedded_emoji_open_as_pictures() -> None:
    data = open_data(DataConfig(source="emoji-16", sequence_len=768, update_len=768, batch_size=2), 0)
    assert sum(data.split(name).n_documents for name in indexes_names()) == 3786
    assert data.batch(0).targets.shape == (2, math.prod((16, 16, 3)))
    assert data.batch(0).loss_mask.min() == 1
    with pytest.raises(UserError, match="--data.sequence-len 3072"):
        open_data(DataConfig(source="emoji-32", sequence_len=768, update_len=768), 0)
