"""From files to batches: find a source, divide it, and read any step of it at random."""

from __future__ import annotations

from linnet.data.batch import END, FIRST_BYTE, NO_DOCUMENT, PAD, UNKNOWN, Batch, Split, Window
from linnet.data.dataset import Data, open_data

__all__ = ["END", "FIRST_BYTE", "NO_DOCUMENT", "PAD", "UNKNOWN", "Batch", "Data", "Split", "Window", "open_data"]
