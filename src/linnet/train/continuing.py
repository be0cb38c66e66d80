"""Whether a run may go on in a folder: with the settings that it began with, but for those that change nothing of what it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

from linnet import config as configs
from linnet.config import RunConfig
from linnet.errors import UserError
from linnet.train.folder import RunFolder
from linnet.train.interchange import stored_weights

# Settings that may change between two parts of one run: they alter neither data order nor parameters (a mesh only their last bits).
FREE_TO_CHANGE = {
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
    "optim.extra_steps",
    "preset",
    "mesh",
}


def check_folder(cfg: RunConfig, folder: RunFolder) -> RunConfig | None:
    """The config of the run that is there already, if this one may go on with it."""
    if not folder.config.exists():
        return None
    old = configs.load(folder.config)
    changed = sorted(
        name for name, value in _flat(old).items() if value != _flat(cfg)[name] and name not in FREE_TO_CHANGE
    )
    if stored_weights.is_weights_alone(folder.path):  # nothing was trained yet: only the model is settled
        changed = [name for name in changed if name.startswith(("model", "family"))]
    if changed:
        name = changed[0]
        more = f" (and {', '.join(changed[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"{folder.path} holds a run with {name} = {_flat(old)[name]!r}, but you ask for {_flat(cfg)[name]!r}{more}. "
            "Fix: choose another folder with --out, or the same settings to go on with that run."
        )
    return old


def _flat(cfg: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(cfg).items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat
