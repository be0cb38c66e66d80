"""From files to batches: find a source, divide it, and read any step of it at random."""

from __future__ import annotations

from linnet.data.batch import NO_DOCUMENT, Batch, Split, Window
from linnet.data.dataset import Data
from linnet.data.load import open_data

__all__ = ["NO_DOCUMENT", "Batch", "Data", "Split", "Window", "open_data"]
