"""The settings of the official Transformer-VQ: arguments of its launch.py, in a JSON file or beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.config.codec import from_dict
from linnet.config.schema import OptimConfig
from linnet.core.errors import UserError, invalid
from linnet.core.files import read_json

OPTIM = {
    "optimizer": "name",
    "lr_max": "lr",
    "lr_schedule": "schedule",
    "n_warmup_step": "warmup_steps",
    "n_max_step": "steps",
    "n_extra_step": "extra_steps",
    "grad_clip": "clip",
    "wd_lam": "decay",
}
"""The reference's name of a setting -> the field of `OptimConfig`."""
GROUPED = "group_wd_params"
"""False: decay applies to every parameter. Not in the official code, but in others that train its models."""


def settings_beside(checkpoint: Path) -> Path:
    """Return the settings file that `linnet export` writes beside a checkpoint, which contains no settings itself.

    Flax treats every file whose name starts with "checkpoint" as one, so this name does not.
    """
    return checkpoint.with_name(f"settings_{checkpoint.name}.json")


def read_settings(path: Path) -> dict[str, Any]:
    """Read launch.py's arguments: an object of them, or one that contains them as `args` or `config`."""
    try:
        values = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: check the path.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). Fix: write launch.py's arguments there as an object.") from None
    if isinstance(values, dict):
        values = values.get("args", values.get("config", values))
    if not isinstance(values, dict):
        raise invalid(f"{path}", type(values).__name__, "an object of launch.py's arguments", "write one")
    return values


def optim_values(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of `OptimConfig` that the settings name, at the top level or in `opt`."""
    nested = settings.get("opt", {})
    if not isinstance(nested, dict):
        raise UserError(f"{where}: its 'opt' is not an object of settings. Fix: write it again.")
    stored = {**settings, **nested}
    values = {ours: stored[theirs] for theirs, ours in OPTIM.items() if theirs in stored}
    if "clip" in values:
        values["clip"] = values["clip"] or None
    if GROUPED in stored:
        values["decay_vectors"] = not stored[GROUPED]
    if values.get("name") == "lion":
        values["momentum_dtype"] = "bfloat16"
    return values


def optim_config(values: Mapping[str, Any], where: str) -> OptimConfig:
    return from_dict(OptimConfig, dict(values), f"{where}: opt.")
