"""Sources made of lists, prepared and opened in a moment, for the tests of prepared data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linnet.config.schema import DataConfig
from linnet.data import TokenDataset, load_dataset
from linnet.data.prepare.chunks import SplitFractions
from linnet.data.prepare.pipeline import PrepareConfig
from linnet.data.sources.documents import DocumentPart
from linnet.tokenizers.load import open_tokenizer

SHARES = SplitFractions(validation=0.2, test=0.2)


@dataclasses.dataclass
class ListSource:
    """A source made of a list: documents, each in parts."""

    documents: list[list[bytes]]
    ends_with_eos: bool = True
    is_single: bool = False
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.n_bytes = 1

    def identity(self) -> dict[str, Any]:
        return {"documents": [[part.hex() for part in parts] for parts in self.documents]}

    def parts(self) -> Iterator[DocumentPart]:
        for i, parts in enumerate(self.documents):
            for j, data in enumerate(parts):
                split = self.splits[i] if self.splits else None
                yield DocumentPart(f"doc{i}", data, j == 0, j == len(parts) - 1, split, 0)


def task_of(source: Any, **changes: Any) -> PrepareConfig:
    task = PrepareConfig(source=source, tokenizer=open_tokenizer("bytes"), fractions=SHARES, size=None, max_broken=0.01)
    return dataclasses.replace(task, **changes)


def opened(folder: Path, sequence_len: int = 8, batch_size: int = 2) -> TokenDataset:
    cfg = DataConfig(source=str(folder), sequence_len=sequence_len, update_len=sequence_len, batch_size=batch_size)
    return load_dataset(cfg, 1)


def many(n: int) -> list[list[bytes]]:
    rng = np.random.default_rng(0)
    return [[bytes(rng.integers(32, 127, int(rng.integers(5, 90)), np.uint8))] for _ in range(n)]
