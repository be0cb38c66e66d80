"""A reference file: weights, inputs and the outputs that the reference computed from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from linnet.convert.npz import read_npz
from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json

KINDS = ("forward", "carry", "decode", "sample", "eval", "grads", "train", "schedule", "nucleus")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    path: Path
    kind: str
    settings: dict[str, Any]
    """`meta.config`: the reference's own settings."""
    params: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def input(self, name: str) -> np.ndarray:
        return self._get("in", self.inputs, name)

    def output(self, name: str) -> np.ndarray:
        return self._get("out", self.outputs, name)

    def setting(self, name: str) -> Any:
        if name not in self.settings:
            raise UserError(f"{self.path}: its config does not say {name!r}, which a {self.kind} file needs.")
        return self.settings[name]

    def _get(self, part: str, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
        if name not in arrays:
            raise UserError(f"{self.path} has no '{part}/{name}', which a {self.kind} file needs. Fix: write it again.")
        return arrays[name]


def read_meta(arrays: dict[str, np.ndarray], path: Path) -> dict[str, Any]:
    """Remove and return `meta` from the arrays: a JSON object with the reference's `config`."""
    if "meta" not in arrays:
        raise UserError(
            f"{path} has no 'meta', so it is not a reference file. Fix: see the layouts `linnet verify` reads."
        )
    try:
        meta = parse_json(text_of(arrays.pop("meta")))
    except ValueError as error:
        raise UserError(f"{path}: its 'meta' is not JSON ({error}). Fix: write the file again.") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
        raise UserError(f"{path}: its 'meta' has no 'config' object. Fix: write the file again.")
    return meta


def text_of(value: np.ndarray) -> str:
    """Return the text of an array that is one string."""
    if value.shape or value.dtype.kind not in "US":
        raise ValueError(f"an array of {value.dtype} and shape {value.shape}, not a string")
    return value.item() if value.dtype.kind == "U" else value.item().decode("utf-8", "replace")


def read_golden(path: Path) -> Golden:
    arrays = read_npz(path)
    meta = read_meta(arrays, path)
    if meta.get("family") != "vq":
        raise invalid(f"{path}: family", meta.get("family"), "vq", "name a file of that family")
    if meta.get("kind") not in KINDS:
        raise invalid(f"{path}: kind", meta.get("kind"), f"one of {', '.join(KINDS)}", "name a file of such a kind")
    parts: dict[str, dict[str, np.ndarray]] = {"params": {}, "in": {}, "out": {}}
    for name, value in arrays.items():
        part, _, rest = name.partition("/")
        if part not in parts or not rest:
            raise UserError(f"{path} has {name!r}, but names start with params/, in/ or out/. Fix: write it again.")
        parts[part][rest] = value
    if not parts["out"]:
        raise UserError(f"{path} has no 'out/..' arrays, so there is nothing to check. Fix: write it again.")
    return Golden(
        path=path,
        kind=meta["kind"],
        settings=meta["config"],
        params=parts["params"],
        inputs=parts["in"],
        outputs=parts["out"],
    )


GOLDENS = Path(__file__).parent / "goldens"


def installed_goldens() -> tuple[Path, ...]:
    """Return the goldens that ship with the package, a few per model family, sorted by name."""
    return tuple(sorted(GOLDENS.rglob("*.npz")))
