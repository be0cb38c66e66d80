"""Human-readable batches: the text of each row, with a marker where another document begins or padding follows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from linnet.data.batch import NO_DOCUMENT, Batch
from linnet.tokenizers.base import Tokenizer


def rows_as_text(batch: Batch, tokenizer: Tokenizer) -> Iterator[str]:
    for targets, documents in zip(np.asarray(batch.targets), np.asarray(batch.doc_ids), strict=True):
        yield "\n".join(_stretches(targets, documents, tokenizer))


def _stretches(targets: np.ndarray, documents: np.ndarray, tokenizer: Tokenizer) -> Iterator[str]:
    changes = np.flatnonzero(np.diff(documents)) + 1
    for start, stop in zip((0, *changes), (*changes, len(targets)), strict=True):
        document = int(documents[start])
        if document == NO_DOCUMENT:
            yield f"[{stop - start} positions of padding]"
            continue
        ids = targets[start:stop]
        ended = bool(ids[-1] == tokenizer.end_id)
        yield f"[document {document}]"
        yield tokenizer.decode(ids[:-1] if ended else ids).decode(errors="replace") + ("[end]" if ended else "")
