"""Determine which encoder made the pairs of a run: text prompts must be encoded with the same one."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from linnet.config.schema import EMOJI_PAIRS, PairsConfig
from linnet.data.embeddings.embed import read_manifest
from linnet.data.embeddings.sources import FOLDERS
from linnet.data.sources.locations import resolve_paths

RECORD = "data.json"
"""File of a run folder that records its training data."""


def find_encoder(cfg: PairsConfig, run: Path | None = None) -> str | None:
    """Return the name for `open_encoder`, or None if it is unknown.

    It is `builtin` for the emoji, and the name in `embed.json` for a folder made by `linnet data embed`. If the data is gone, the
    run's own record is used.
    """
    name = _find_in_data(cfg)
    return _read_from_run(run) if name is None and run is not None else name


def _find_in_data(cfg: PairsConfig) -> str | None:
    cfg = resolve_paths(cfg)
    if cfg.images is None and cfg.source == EMOJI_PAIRS:
        return "builtin"
    if cfg.images is None:
        return _read_from_manifest(Path(os.path.expanduser(cfg.source)))
    # The texts decide: their shards may have been made for images that came from elsewhere.
    if cfg.texts is None:
        return None
    texts = Path(os.path.expanduser(cfg.texts))
    return _read_from_manifest(texts.parent) if texts.name == FOLDERS["text"] else None


def _read_from_manifest(folder: Path) -> str | None:
    manifest = read_manifest(folder)
    name = None if manifest is None else manifest.task.get("encoder")
    return name if isinstance(name, str) else None


def _read_from_run(run: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = json.loads((run / RECORD).read_text()).get("encoder")
        return name if isinstance(name, str) else None
    return None
