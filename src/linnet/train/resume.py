"""Resume check: all settings must match the saved config, except those that do not affect training."""

from __future__ import annotations

import dataclasses
from typing import Any

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError
from linnet.data.sources.locations import FIELDS
from linnet.runs import weights as stored_weights
from linnet.runs.folder import RunFolder
from linnet.runs.relocated import check_same_data, recorded_fingerprint

# Settings that may change on resume: they affect neither data order nor parameters (a mesh changes only rounding).
MUTABLE_ON_RESUME = {
    "train.log_every",
    "train.eval_every",
    "train.eval_minutes",
    "train.eval_timesteps",
    "train.eval_sequences",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.keep",
    "train.max_bad_steps",
    "train.collapse_alarm",
    "train.sample_tokens",
    "train.trackers",
    "train.exports",
    "optim.extra_steps",
    "data.max_unpacked_gb",
    "preset",
    "mesh",
}


LOCATIONS = {f"data.{name}" for name in (*FIELDS, "base")}
"""Settings that may change as long as the content of the data is the same."""


def check_resumable(cfg: RunConfig, folder: RunFolder, fingerprint: str | None = None) -> RunConfig | None:
    """Return the config of the run in `folder` (None if there is none); raise if `cfg` cannot resume it.

    `fingerprint`: fingerprint of the data that `cfg` names.
    """
    if not folder.config.exists():
        return None
    old = codec.load(folder.config)
    ours, theirs = _flat(cfg), _flat(old)
    names = (ours.keys() | theirs.keys()) - MUTABLE_ON_RESUME - {"data.base"}
    moved = [name for name in LOCATIONS if ours.get(name) != theirs.get(name)]
    if fingerprint is not None and moved and recorded_fingerprint(folder.path) is not None:
        check_same_data(folder.path, fingerprint, cfg.data.source)
        names -= LOCATIONS
    changed = sorted(name for name in names if ours.get(name) != theirs.get(name))
    if stored_weights.is_weights_only(folder.path):  # not trained yet: only the model is fixed
        changed = [name for name in changed if name.startswith(("model", "family"))]
    if changed:
        name = changed[0]
        more = f" (and {', '.join(changed[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"{folder.path} holds a run with {name} = {_flat(old).get(name)!r}, but you ask for {_flat(cfg).get(name)!r}{more}. "
            f"Fix: {_more_steps(old, cfg) if name == 'optim.steps' else ''}{_instead(folder, changed)}"
        )
    return old


def _more_steps(old: RunConfig, cfg: RunConfig) -> str:
    """Advice for a larger optim.steps: the schedule ends there, so a run is extended with optim.extra_steps."""
    more = cfg.optim.steps - old.optim.steps
    if more <= 0:
        return ""
    more += old.optim.extra_steps
    return f"to train it for longer, leave --optim.steps out and give --optim.extra-steps {more}; "


def _instead(folder: RunFolder, changed: list[str]) -> str:
    """Alternatives to suggest in the error. Notes that --out without --from starts from random weights."""
    same = f"give the same settings to continue that run (`linnet train {folder.path}`)"
    if any(name.startswith(("model.", "family", "parent")) for name in changed):
        return f"{same}, or train another model from random weights with another --out."
    flag = f"--{changed[0].replace('_', '-')}"
    return (
        f"{same}; to start a new run from its weights, `linnet train --from {folder.path} {flag} .. --out ANOTHER`; --out without "
        "--from starts from random weights."
    )


def _flat(cfg: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(cfg).items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat
