"""Whose vectors the pairs of a run are: only with that encoder can a text be typed."""

from __future__ import annotations

import os
from pathlib import Path

from linnet.config import EMOJI_PAIRS, PairsConfig
from linnet.data.pairs.embed import read_notes
from linnet.data.pairs.sources import FOLDERS


def encoder_of(cfg: PairsConfig) -> str | None:
    """The name for `open_encoder`: the built-in one's for the emoji, what `linnet data embed` noted for a folder that it made; none
    where nobody knows."""
    if cfg.images is None and cfg.source == EMOJI_PAIRS:
        return "builtin"
    if cfg.images is None:
        return _noted(Path(os.path.expanduser(cfg.source)))
    # The texts decide: their shards may have been made for images that came from elsewhere.
    if cfg.texts is None:
        return None
    texts = Path(os.path.expanduser(cfg.texts))
    return _noted(texts.parent) if texts.name == FOLDERS["text"] else None


def _noted(folder: Path) -> str | None:
    notes = read_notes(folder)
    name = None if notes is None else notes.asked.get("encoder")
    return name if isinstance(name, str) else None
