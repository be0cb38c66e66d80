"""Data loading: find a source, split it, and read the batch of any step by random access."""

from __future__ import annotations

from linnet.data.batch import NO_DOCUMENT, Batch, Split, Window
from linnet.data.dataset import TokenDataset
from linnet.data.load import load_dataset

__all__ = ["NO_DOCUMENT", "Batch", "Split", "TokenDataset", "Window", "load_dataset"]
