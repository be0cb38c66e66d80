"""A reference file (golden): an .npz archive of weights, inputs and the outputs that the reference computed from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linnet.convert.npz import read_npz, read_npz_array
from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json

GOLDENS = Path(__file__).parent / "goldens"
Arrays = dict[str, np.ndarray]


def installed_goldens() -> tuple[Path, ...]:
    """Return the goldens that ship with the package, a few per model family, sorted by name."""
    return tuple(sorted(GOLDENS.rglob("*.npz")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    path: Path
    meta: dict[str, Any]
    arrays: Arrays

    @property
    def kind(self) -> str:
        return self.meta["kind"]

    @property
    def settings(self) -> dict[str, Any]:
        """The reference's own settings (`meta.config`)."""
        return self.meta["config"]

    def setting(self, name: str) -> Any:
        if name not in self.settings:
            raise UserError(
                f"{self.path}: its config has no {name!r}, which a {self.kind} file needs. Fix: write it again."
            )
        return self.settings[name]

    def get(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise UserError(f"{self.path} has no {name!r}, which a {self.kind} file needs. Fix: write it again.")
        return self.arrays[name]

    @cached_property
    def params(self) -> Arrays:
        return self.below("params/")

    @cached_property
    def inputs(self) -> Arrays:
        return self.below("in/")

    @cached_property
    def outputs(self) -> Arrays:
        return self.below("out/")

    def below(self, prefix: str) -> Arrays:
        """Return the arrays under a prefix, without it."""
        return {name.removeprefix(prefix): x for name, x in self.arrays.items() if name.startswith(prefix)}


def read_family(path: Path) -> str | None:
    """Return the family that `meta` states. None for an unreadable file, whose error its reader reports."""
    try:
        meta = parse_json(_text(read_npz_array(path, "meta")))
    except ValueError:
        return None
    return meta.get("family") if isinstance(meta, dict) else None


def read_golden(path: Path, family: str, kinds: Collection[str]) -> Golden:
    arrays = read_npz(path)
    meta = _read_meta(arrays, path)
    if meta.get("family") != family:
        raise invalid(f"{path}: family", meta.get("family"), family, "pass a file of that family")
    if meta.get("kind") not in kinds:
        raise invalid(
            f"{path}: kind", meta.get("kind"), f"one of {', '.join(kinds)}", "pass a file of one of these kinds"
        )
    return Golden(path=path, meta=meta, arrays=arrays)


def _read_meta(arrays: Arrays, path: Path) -> dict[str, Any]:
    """Remove and return `meta` from the arrays: a JSON object with the reference's `config`."""
    if "meta" not in arrays:
        raise UserError(
            f"{path} has no 'meta', so it is not a reference file. Fix: see the layouts `linnet verify` reads."
        )
    try:
        meta = parse_json(_text(arrays.pop("meta")))
    except ValueError as error:
        raise UserError(f"{path}: its 'meta' is not JSON ({error}). Fix: write the file again.") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("config"), dict):
        raise UserError(f"{path}: its 'meta' has no 'config' object. Fix: write the file again.")
    return meta


def _text(value: np.ndarray) -> str:
    """Return the text of an array that is one string."""
    if value.shape or value.dtype.kind not in "US":
        raise ValueError(f"an array of {value.dtype} and shape {value.shape}, not a string")
    return value.item() if value.dtype.kind == "U" else value.item().decode("utf-8", "replace")
