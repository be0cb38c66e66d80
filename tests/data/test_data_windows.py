"""Packing and order: every token once in the windows, every window once in an epoch, any step at random."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config.schema import DataConfig
from linnet.core.special_tokens import EOS, FIRST_BYTE, PAD
from linnet.data import Batch, TokenDataset, load_dataset
from linnet.data.batch import make_batch
from linnet.data.packed import PackedSplit
from linnet.data.shuffle import permutation, window_indices

documents = st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=12)


def pack(docs: list[tuple[bytes, bool]], sequence_len: int) -> PackedSplit:
    return PackedSplit(
        np.frombuffer(b"".join(text for text, _ in docs), np.uint8),
        np.array([len(text) for text, _ in docs], np.int64),
        np.array([ends for _, ends in docs], bool),
        sequence_len,
    )


def slow_tokens(docs: list[tuple[bytes, bool]]) -> list[tuple[int, int]]:
    """(token, document) of a split, the obvious way."""
    return [
        (token, d)
        for d, (text, ends) in enumerate(docs)
        for token in [*(b + FIRST_BYTE for b in text), *([EOS] if ends else [])]
    ]


def data_of(text: bytes, folder: Path, sequence_len: int, update_len: int, batch_size: int) -> TokenDataset:
    (folder / "text").write_bytes(text)
    cfg = DataConfig(
        source=str(folder / "text"),
        validation_fraction=0,
        test_fraction=0,
        sequence_len=sequence_len,
        update_len=update_len,
        batch_size=batch_size,
    )
    return load_dataset(cfg, 3)


@settings(deadline=None)
@given(docs=documents, sequence_len=st.integers(1, 20))
def test_windows_contain_every_token_of_every_document_once(docs: list[tuple[bytes, bool]], sequence_len: int) -> None:
    split, expected = pack(docs, sequence_len), slow_tokens(docs)
    windows = [split.window(i) for i in range(split.n_windows)]
    assert all(len(values) == sequence_len for window in windows for values in window)
    seen = [
        (int(token), int(doc)) for window in windows for token, doc, counts in zip(*window, strict=True) if counts == 1
    ]
    assert seen == expected
    padding = [(t, d, m) for w in windows for t, d, m in zip(*w, strict=True) if m != 1]
    assert all(p == (PAD, -1, 0) for p in padding)
    assert len(padding) < sequence_len, "only the last window may be padded"
    assert split.n_tokens == len(expected)
    assert split.n_bytes == sum(len(text) for text, _ in docs)
    assert split.content(0, split.n_bytes).tobytes() == b"".join(text for text, _ in docs)
    assert split.n_documents == len(docs)


@settings(deadline=None)
@given(docs=documents.filter(lambda d: bool(slow_tokens(d))), update_len=st.integers(1, 6), updates=st.integers(1, 4))
def test_updates_are_slices_of_the_whole_sequence(
    docs: list[tuple[bytes, bool]], update_len: int, updates: int
) -> None:
    sequence_len = update_len * updates
    split = pack(docs, sequence_len)
    rows = list(range(split.n_windows))
    full = make_batch(split, rows, 0, sequence_len, len(rows))
    parts = [make_batch(split, rows, u * update_len, (u + 1) * update_len, len(rows)) for u in range(updates)]
    joined = jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *parts)
    jax.tree.map(np.testing.assert_array_equal, joined, full)
    assert (np.asarray(full.inputs)[:, 0] == EOS).all(), "every sequence is prompted by the end id"
    np.testing.assert_array_equal(full.inputs[:, 1:], full.targets[:, :-1])


@settings(deadline=None)
@given(docs=documents, other=documents)
def test_fingerprint_distinguishes_texts_and_boundaries(
    docs: list[tuple[bytes, bool]], other: list[tuple[bytes, bool]]
) -> None:
    assert (pack(docs, 4).fingerprint() == pack(other, 4).fingerprint()) == (docs == other)
    assert pack(docs, 4).fingerprint() == pack(docs, 9).fingerprint(), "of the content, not of the windows"


@settings(deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 4))
def test_every_epoch_has_every_window_once(n: int, batch: int, seed: int, epochs: int) -> None:
    stream = [w for first in range(0, n * epochs, batch) for w in window_indices(seed, first, batch, n)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_order_is_pinned() -> None:
    """A change here would break the resuming of every run that was ever started."""
    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert permutation(7, 2, 8).tolist() == [6, 7, 4, 0, 1, 5, 3, 2]


def test_seeds_and_epochs_differ_and_the_cache_is_immutable() -> None:
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 50)[0] = 1


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("updates", [1, 3])
def test_batches_cover_each_epoch_and_do_not_depend_on_the_order_of_calls(
    tmp_path: Path, batch_size: int, updates: int
) -> None:
    text = bytes(range(1, 101))
    data = data_of(text, tmp_path, sequence_len=12, update_len=12 // updates, batch_size=batch_size)
    n = data.train.n_windows
    assert n == 9
    n_steps = updates * (-(-3 * n // batch_size))
    batches = {step: data.batch(step) for step in range(n_steps)}
    sequences = [
        np.concatenate([np.asarray(batches[s + u].targets)[b] for u in range(updates)])
        for s in range(0, n_steps, updates)
        for b in range(batch_size)
    ]
    for epoch in range(3):
        tokens = np.concatenate(sequences[epoch * n : (epoch + 1) * n])
        assert sorted(tokens[tokens != PAD]) == [b + FIRST_BYTE for b in text]

    permutation.cache_clear()
    again = data_of(text, tmp_path, sequence_len=12, update_len=12 // updates, batch_size=batch_size)
    for step in np.random.default_rng(0).permutation(n_steps).tolist():
        jax.tree.map(np.testing.assert_array_equal, again.batch(step), batches[step])


def test_batch_is_a_pytree_of_the_promised_types(tmp_path: Path) -> None:
    batch = data_of(b"hello", tmp_path, sequence_len=8, update_len=8, batch_size=2).batch(0)
    assert isinstance(batch, Batch)
    assert [x.dtype for x in jax.tree.leaves(batch)] == [np.int32, np.int32, np.int32, np.float32]
    assert {x.shape for x in jax.tree.leaves(batch)} == {(2, 8)}
    assert all(x.flags.c_contiguous for x in jax.tree.leaves(batch))
    assert np.asarray(batch.inputs[0]).tolist() == [1, *(b + 3 for b in b"hello"), 0, 0]
    assert np.asarray(batch.targets[0]).tolist() == [*(b + 3 for b in b"hello"), 0, 0, 0]
    assert np.asarray(batch.loss_mask[0]).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert np.asarray(batch.doc_ids[0]).tolist() == [0, 0, 0, 0, 0, -1, -1, -1]
    assert float(jax.jit(lambda b: b.loss_mask.sum())(batch)) == 10


@pytest.mark.parametrize("batch_size", [1, 4, 9, 20])
def test_evaluation_counts_every_target_once(tmp_path: Path, batch_size: int) -> None:
    text = bytes(range(1, 101))
    data = data_of(text, tmp_path, sequence_len=12, update_len=4, batch_size=2)
    batches = list(data.evaluation("train", batch_size, None))
    assert {np.shape(b.targets) for b in batches} == {(batch_size, 12)}
    seen = np.concatenate([b.targets[np.asarray(b.loss_mask) == 1] for b in batches])
    assert seen.tolist() == [b + FIRST_BYTE for b in text]
    filler = np.concatenate([np.asarray(b.doc_ids) for b in batches])[9:]
    assert (filler == -1).all()


def test_limited_evaluation_is_spread_over_the_split(tmp_path: Path) -> None:
    data = data_of(bytes(range(100)).replace(b"\0", b"."), tmp_path, sequence_len=10, update_len=10, batch_size=2)
    (batch,) = data.evaluation("train", 5, 5)
    assert batch.targets[:, 0].tolist() == [ord(".") + 3, *(start + 3 for start in (20, 40, 60, 80))]
    assert sum(int(np.sum(b.loss_mask)) for b in data.evaluation("train", 3, 1000)) == 100


def test_batch_of_8_x_2048_takes_well_under_a_millisecond() -> None:
    data = load_dataset(DataConfig(), 0)
    data.batch(0)
    best = min(_seconds(data, range(k * 50, k * 50 + 50)) for k in range(4)) / 50
    assert best < 1e-3, f"{best * 1e3:.2f} ms a batch"


def _seconds(data: TokenDataset, steps: range) -> float:
    start = time.process_time()
    for step in steps:
        data.batch(step)
    return time.process_time() - start
