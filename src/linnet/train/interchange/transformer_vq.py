"""A checkpoint of the official Transformer-VQ, `.npz` or Flax msgpack, becomes a config and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import UserError, refuse
from linnet.families.vq.config import VQConfig
from linnet.families.vq.convert import EMBED, config_from_reference, from_reference, infer_config
from linnet.families.vq.params import VQBuffers, VQParams
from linnet.json_file import parse_json
from linnet.train.interchange.flax import flatten, read_flax
from linnet.train.interchange.npz import read_npz

ZIP_START = b"PK"
# A whole train state, a saved target, and the collections of Flax all wrap the weights in one of these.
WRAPPERS = ("params/", "target/", "state/")


def read_transformer_vq(
    path: Path, max_unpacked_gb: float | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights under the reference's names, and the settings saved beside them (none in a msgpack file)."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(ZIP_START))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Fix: check the path.") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder. Fix: name the checkpoint file in it.") from None
    if start != ZIP_START:
        return _unwrap(flatten(read_flax(path)), path), {}
    arrays = read_npz(path, max_unpacked_gb, "--max-unpacked-gb")
    meta = _settings(arrays.pop("meta"), path) if "meta" in arrays else {}
    return _unwrap(arrays, path), meta


def import_config(
    tree: Mapping[str, np.ndarray],
    settings: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> VQConfig:
    """What the shapes tell, then what the file says, then what the user says. `defaults` fill what none of them knows."""
    values = {**(defaults or {}), **infer_config(tree), **settings, **(overrides or {})}
    missing = [name for name in ("block_len", "mem_len") if name not in values]
    if missing:
        raise refuse(
            f"model.{missing[0]}",
            None,
            "given: the weights do not tell it",
            f"set --model.{missing[0].replace('_', '-')} as the model was trained (the paper's: 512)",
        )
    return config_from_reference(values)


def to_model(tree: Mapping[str, np.ndarray], cfg: VQConfig) -> tuple[VQParams, VQBuffers]:
    bad = sorted(name for name, value in tree.items() if not np.all(np.isfinite(np.asarray(value, np.float32))))
    if bad:
        raise refuse(f"the weight {bad[0]}", "not finite", "numbers only", "use a checkpoint from before it diverged")
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


def _settings(meta: np.ndarray, path: Path) -> dict[str, Any]:
    try:
        values = parse_json(str(meta[()]))
        settings = values.get("config", values)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: its 'meta' is not a JSON object ({error}). Fix: write it again.") from None
    if not isinstance(settings, dict):
        raise refuse(f"{path}: the config in 'meta'", settings, "an object of settings", "write it again")
    return settings
