"""The training batch, and the `Split` protocol that a data source implements: fixed-length token windows with random access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped

from linnet.core.pytree import pytree
from linnet.core.special_tokens import PAD
from linnet.tokenizers.base import Tokenizer

NO_DOCUMENT = -1


@pytree
class Batch:
    """B sequences, or the same T positions of B sequences. `doc_ids` is -1 at padding."""

    inputs: Int32[Array | np.ndarray, "B T"]
    targets: Int32[Array | np.ndarray, "B T"]
    doc_ids: Int32[Array | np.ndarray, "B T"]
    loss_mask: Float32[Array | np.ndarray, "B T"]
    condition: Any = None  # B E: the image embedding of each sequence (zeros where there is none), or None

    def slice(self, start: int, stop: int) -> Batch:
        """Return positions start to stop of the same sequences."""
        inputs, targets, doc_ids, mask = (
            np.asarray(x)[:, start:stop] for x in (self.inputs, self.targets, self.doc_ids, self.loss_mask)
        )
        return Batch(inputs=inputs, targets=targets, doc_ids=doc_ids, loss_mask=mask, condition=self.condition)


class Window(NamedTuple):
    targets: Int32[np.ndarray, " T"]
    doc_ids: Int32[np.ndarray, " T"]
    mask: Float32[np.ndarray, " T"]


class Split(Protocol):
    """Windows of one length that cover every token of a split once. Implemented by token shards and by images."""

    @property
    def n_documents(self) -> int: ...
    @property
    def n_bytes(self) -> int:
        """Bytes of content, without EOS ids."""
        ...

    @property
    def n_tokens(self) -> int:
        """Number of targets in the loss: includes EOS ids; excludes padding and a first token that has no preceding token."""
        ...

    @property
    def n_windows(self) -> int: ...
    def window(self, i: int) -> Window: ...
    def slice(self, i: int, start: int, stop: int) -> Window:
        """Return positions start to stop of window i."""
        ...

    @property
    def n_words(self) -> int | None:
        """Word count of the original text, for word-level perplexity; None if unknown."""
        ...

    @property
    def bos_id(self) -> int | None:
        """BOS id placed before every window. None: a window begins with the token before its first target."""
        ...

    @property
    def eos_id(self) -> int: ...
    def with_bos(self, bos_id: int | None) -> Split: ...
    def first_input(self, i: int) -> int:
        """Return the token before the first target of window i."""
        ...

    def content(self, start: int, stop: int) -> Shaped[np.ndarray, " n"]:
        """Return the stored content between two positions, without EOS ids."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the content and of its document boundaries."""
        ...


def make_batch(
    split: Split,
    windows: Sequence[int],
    start: int,
    stop: int,
    n_rows: int,
    embeds: Float32[np.ndarray, "n E"] | None = None,
) -> Batch:
    """Build a batch of positions start to stop of these windows, padded to `n_rows`. `embeds`: one row per window of the split."""
    assert len(windows) <= n_rows, f"{len(windows)} windows do not fit into {n_rows} rows"
    shape = (n_rows, stop - start)
    inputs, targets = np.full(shape, PAD, np.int32), np.full(shape, PAD, np.int32)
    doc_ids, mask = np.full(shape, NO_DOCUMENT, np.int32), np.zeros(shape, np.float32)
    # A slice that starts in mid-window is read from one position earlier: that token is its first input.
    before = min(start, 1)
    for row, window in enumerate(windows):
        piece = split.slice(window, start - before, stop)
        targets[row], doc_ids[row], mask[row] = (values[before:] for values in piece)
        inputs[row, 0] = piece.targets[0] if before else split.first_input(window)
    if not before:
        inputs[len(windows) :, 0] = split.eos_id if split.bos_id is None else split.bos_id
    inputs[:, 1:] = targets[:, :-1]
    condition = None
    if embeds is not None:
        condition = np.zeros((n_rows, embeds.shape[1]), np.float32)
        condition[: len(windows)] = embeds[list(windows)]
    return Batch(inputs=inputs, targets=targets, doc_ids=doc_ids, loss_mask=mask, condition=condition)


def format_rows(batch: Batch, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield each row as text, with markers for documents, EOS and padding."""
    for targets, documents in zip(np.asarray(batch.targets), np.asarray(batch.doc_ids), strict=True):
        yield "\n".join(_format_segments(targets, documents, tokenizer))


def _format_segments(targets: np.ndarray, documents: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    changes = np.flatnonzero(np.diff(documents)) + 1
    for start, stop in zip((0, *changes), (*changes, len(targets)), strict=True):
        document = int(documents[start])
        if document == NO_DOCUMENT:
            yield f"[{stop - start} positions of padding]"
            continue
        ids = targets[start:stop]
        has_eos = bool(ids[-1] == tokenizer.eos_id)
        yield f"[document {document}]"
        yield tokenizer.decode(ids[:-1] if has_eos else ids).decode(errors="replace") + ("[end]" if has_eos else "")
