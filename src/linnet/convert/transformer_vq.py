"""Convert a checkpoint of the official Transformer-VQ (`.npz` or Flax msgpack) to a config and weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.convert.flax import flatten, read_flax
from linnet.convert.npz import read_npz
from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import EMBED, config_from_reference, from_reference, infer_config
from linnet.models.vq.params import VQBuffers, VQParams

ZIP_START = b"PK"
CHECKPOINT = re.compile(r"checkpoint_(\d+)")
# A complete train state, a saved target, and Flax collections all wrap the weights in one of these.
WRAPPERS = ("params/", "target/", "state/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialCheckpoint:
    """Content of a checkpoint of the official code."""

    path: Path
    params: dict[str, np.ndarray]
    """Weights by '/'-joined names."""
    settings: dict[str, Any]
    """Saved beside the weights in an .npz; a msgpack file has none."""
    step: int | None = None
    opt_state: dict[str, Any] | None = None
    """Optimizer state as it was saved: a nested dict."""


def read_transformer_vq(
    path: Path, max_unpacked_gb: float | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the weights under the reference's names, and the settings saved beside them (none in a msgpack file)."""
    found = read_official(path, max_unpacked_gb)
    return found.params, found.settings


def read_official(path: Path, max_unpacked_gb: float | None = None) -> OfficialCheckpoint:
    """Read a checkpoint file, or the newest one of a folder of checkpoints."""
    if path.is_dir():
        path = find_newest_checkpoint(path)
    try:
        with open(path, "rb") as file:
            start = file.read(len(ZIP_START))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Fix: check the path.") from None
    if start == ZIP_START:
        arrays = read_npz(path, max_unpacked_gb, "--max-unpacked-gb")
        meta = _parse_settings(arrays.pop("meta"), path) if "meta" in arrays else {}
        return OfficialCheckpoint(path=path, params=_unwrap(arrays, path), settings=meta)
    tree = read_flax(path)
    opt_state = tree.get("opt_state")
    return OfficialCheckpoint(
        path=path,
        params=_unwrap(flatten(tree), path),
        settings={},
        step=_parse_step(tree.get("step"), path),
        opt_state=opt_state if isinstance(opt_state, dict) else None,
    )


def find_newest_checkpoint(folder: Path) -> Path:
    """Return the file `checkpoint_N` with the largest number."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := CHECKPOINT.fullmatch(path.name))}
    if not found:
        raise UserError(
            f"{folder} is a folder without a checkpoint_N. Fix: name the official checkpoint file, or the folder that holds it."
        )
    newest = found[max(found)]
    if newest.is_dir():
        raise UserError(
            f"{newest} is a folder, as Flax writes through Orbax; only Flax's msgpack files are read. Fix: save it with "
            "flax.config.update('flax_use_orbax_checkpointing', False), or name another checkpoint_N."
        )
    return newest


def _parse_step(value: Any, path: Path) -> int | None:
    if value is None:
        return None
    array = np.asarray(value)
    if array.shape or array.dtype.kind not in "iu" or not 0 <= int(array) < 2**31:
        raise UserError(f"{path}: its 'step' is not a number of updates. Fix: copy it again.")
    return int(array)


def import_config(
    tree: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> VQConfig:
    """Build the config from shapes, then the file's settings, then `overrides`; `defaults` fill what is still missing."""
    values = {**(defaults or {}), **infer_config(tree), **settings, **(overrides or {})}
    missing = [name for name in ("block_len", "mem_len") if name not in values]
    if missing:
        wanted = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise invalid(
            f"--{missing[0].replace('_', '-')}",
            None,
            "given: the weights do not determine it",
            f"add {wanted} as the model was trained (the paper's: 512)",
        )
    return config_from_reference(values)


def to_model(tree: Mapping[str, np.ndarray], cfg: VQConfig) -> tuple[VQParams, VQBuffers]:
    bad = sorted(name for name, value in tree.items() if not np.all(np.isfinite(np.asarray(value, np.float32))))
    if bad:
        raise invalid(f"the weight {bad[0]}", "not finite", "numbers only", "use a checkpoint from before it diverged")
    return from_reference(tree, cfg)


def _unwrap(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    tree = arrays
    while EMBED not in tree:
        wrapper = next((w for w in WRAPPERS if any(name.startswith(w) for name in tree)), None)
        if wrapper is None:
            some = ", ".join(sorted(arrays)[:3]) or "nothing"
            raise UserError(
                f"{path} is not a Transformer-VQ checkpoint: it needs {EMBED!r}, got {some}. "
                "Fix: name the official checkpoint file, or an .npz of its '/'-joined names."
            )
        tree = {name.removeprefix(wrapper): value for name, value in tree.items() if name.startswith(wrapper)}
    # Beside bare weights there may be a golden's inputs and outputs.
    return {name: value for name, value in tree.items() if not name.startswith(("in/", "out/", "opt_state/"))}


def _parse_settings(meta: np.ndarray, path: Path) -> dict[str, Any]:
    try:
        values = parse_json(str(meta[()]))
        settings = values.get("config", values)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: its 'meta' is not a JSON object ({error}). Fix: write it again.") from None
    if not isinstance(settings, dict):
        raise invalid(f"{path}: the config in 'meta'", settings, "an object of settings", "write it again")
    return settings
