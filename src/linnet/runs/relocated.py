"""Data of a run at a new location, accepted if its content is what the run was trained on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from linnet.config.schema import PairsConfig, RunConfig
from linnet.core.errors import UserError
from linnet.data import load_dataset
from linnet.data.embeddings import open_pairs
from linnet.data.sources.locations import resolve_paths

ELSEWHERE = {"images": None, "texts": None, "metadata": None, "encodings": None}
"""Settings of embedding pairs that a new `source` overrides."""


def relocated(cfg: RunConfig, source: str) -> RunConfig:
    """Return the config with its data at `source`, relative to the working directory."""
    beside = ELSEWHERE if isinstance(cfg.data, PairsConfig) else {}
    # The other paths become absolute, since `base` no longer applies.
    return dataclasses.replace(
        cfg, data=dataclasses.replace(resolve_paths(cfg.data), source=source, base=None, **beside)
    )


def data_fingerprint(cfg: RunConfig) -> str:
    """Open the data of a run and return its fingerprint, which depends on content only, not on names or locations."""
    if not cfg.reads_tokens:
        return open_pairs(cfg.pairs, cfg.seed, encodings=cfg.pair_model.text_encodings).fingerprint
    return load_dataset(cfg.tokens, cfg.seed).with_bos(cfg.lm.bos_id).fingerprint


def recorded_fingerprint(run: Path) -> str | None:
    """Return the fingerprint of the data that a run was trained on; None if it was never trained."""
    try:
        value = json.loads((run / "data.json").read_bytes()).get("fingerprint")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def check_same_data(run: Path, fingerprint: str, source: str) -> None:
    recorded = recorded_fingerprint(run)
    if recorded is not None and recorded != fingerprint:
        raise UserError(
            f"the data at {source!r} is not what the run in {run} was trained on (fingerprint {fingerprint[:12]}, the run has "
            f"{recorded[:12]}). Fix: name an unchanged copy of its data with --data.source. To evaluate on other data, use "
            f"`linnet eval {run} --source {source}`; to train on it, `linnet train --from {run} --data.source {source} --out ANOTHER`."
        )
