"""From files to batches: find a source, divide it, and read any step of it at random."""

from __future__ import annotations

from linnet.data.batch import NO_DOCUMENT, Batch, Split, Window
from linnet.data.dataset import TokenDataset
from linnet.data.load import load_dataset

__all__ = ["NO_DOCUMENT", "Batch", "Split", "TokenDataset", "Window", "load_dataset"]
