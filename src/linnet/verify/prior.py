"""Reference files of the diffusion prior: their layout, and the comparison of their contents with Linnet's results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.convert.npz import read_npz, read_npz_array
from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import from_reference
from linnet.models.prior.params import PriorParams
from linnet.models.prior.reference import network_config
from linnet.models.prior.releases import behaviour
from linnet.verify.compare import Check, Skipped, Verification, compare
from linnet.verify.golden import read_meta, text_of

UNKNOWN = "not an output that Linnet knows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorGolden:
    path: Path
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def kind(self) -> str:
        return self.meta["kind"]

    def get(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise UserError(f"{self.path} has no {name!r}, which a {self.kind} file needs. Fix: write it again.")
        return self.arrays[name]

    @property
    def version(self) -> str | None:
        """Release that computed the file; None if it is not stated."""
        found = self.meta.get("version", self.arrays.get("out/version"))
        return None if found is None else str(np.asarray(found)[()])

    def below(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays under a prefix, without it."""
        return {name.removeprefix(prefix): x for name, x in self.arrays.items() if name.startswith(prefix)}

    def settings(self, name: str) -> dict[str, Any]:
        """Return an object of the meta, or of its config."""
        found = self.meta.get(name, self.meta["config"].get(name))
        if not isinstance(found, dict):
            raise UserError(f"{self.path}: its meta has no object {name!r}, which a {self.kind} file needs.")
        return found

    def model(
        self, settings: Mapping[str, Any], weights: str = "params/", **more: Any
    ) -> tuple[PriorConfig, PriorParams]:
        cfg = self.config(settings, **more)
        return cfg, from_reference(self.below(weights), cfg)

    def config(self, settings: Mapping[str, Any], **more: Any) -> PriorConfig:
        """Return the config for the release that the file names, else for the newest."""
        release = {} if self.version is None else behaviour(self.version)
        try:
            return network_config(settings, **{**release, **more})
        except TypeError as error:
            raise UserError(f"{self.path}: its settings are not those of a network ({error}).") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorReplay:
    values: dict[str, Any]
    """Results by the file's own names."""
    inputs: frozenset[str] = frozenset()
    """Names outside of in/ and params/ that are not results."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    scales: dict[str, float] = dataclasses.field(default_factory=dict)
    """Lower bound of the magnitude that an error is relative to, if larger than the largest expected value."""
    notes: tuple[str, ...] = ()
    in_float64: Callable[[], dict[str, Any]] | None = None
    """Evaluates values whose float32 rounding may exceed the tolerance in float64; called only if one does."""


Replayer = Callable[[PriorGolden], PriorReplay]


def is_prior(path: Path) -> bool:
    """Detect the family by `meta`. An unreadable file is left to the reader that reports the error."""
    try:
        meta = parse_json(text_of(read_npz_array(path, "meta")))
    except ValueError:
        return False
    return isinstance(meta, dict) and meta.get("family") == "prior"


def read_prior(path: Path, kinds: Mapping[str, Any]) -> PriorGolden:
    arrays = read_npz(path)
    meta = read_meta(arrays, path)
    if meta.get("kind") not in kinds:
        raise invalid(f"{path}: kind", meta.get("kind"), f"one of {', '.join(kinds)}", "name a file of such a kind")
    return PriorGolden(path=path, meta=meta, arrays=arrays)


def verify_prior(path: Path, replays: Mapping[str, Replayer], tolerance: float) -> Verification:
    golden = read_prior(path, replays)
    replay = replays[golden.kind](golden)
    results = {
        name: value
        for name, value in golden.arrays.items()
        if not name.startswith(("in/", "params/", "sd_")) and name not in replay.inputs and value.dtype.kind != "U"
    }
    checks: list[Check] = []
    for name, want in results.items():
        if name in replay.values:
            checks += _checks(name, np.asarray(replay.values[name]), want, tolerance, replay.scales.get(name, 0.0))
    checks = _judged_in_float64(checks, replay, results, tolerance)
    skipped = tuple(Skipped(name, replay.skipped.get(name, UNKNOWN)) for name in results if name not in replay.values)
    return Verification(
        file=str(path),
        kind=golden.kind,
        tolerance=tolerance,
        checks=tuple(checks),
        not_checked=skipped,
        notes=replay.notes,
    )


def _judged_in_float64(
    checks: list[Check], replay: PriorReplay, results: Mapping[str, np.ndarray], tolerance: float
) -> list[Check]:
    """Compare failed values with a float64 evaluation.

    Two float32 programs that round differently may be further apart than either is from the exact value. In that case both are
    compared with the float64 value instead, each within the same tolerance.
    """
    if replay.in_float64 is None or all(check.passed for check in checks):
        return checks
    try:
        exact = replay.in_float64()
    except NotImplementedError:  # the float32 comparison stands
        return checks
    return [
        check
        if check.passed or check.name not in exact
        else _from_exact(check, replay.values[check.name], results[check.name], exact[check.name], tolerance)
        for check in checks
    ]


def _from_exact(check: Check, mine: Any, theirs: np.ndarray, exact: np.ndarray, tolerance: float) -> Check:
    file, own = (compare(check.name, value, exact, tolerance) for value in (theirs, mine))
    note = f"float32 of both rounds: {check.error:.2e} apart; from float64 the file {file.error:.2e}, Linnet {own.error:.2e}"
    return Check(check.name, max(file.error, own.error), file.passed and own.passed, note)


def _checks(name: str, got: np.ndarray, want: np.ndarray, tolerance: float, scale: float) -> list[Check]:
    """Compare infinities separately: next to them every error would look small."""
    if want.dtype.kind != "f" or got.shape != want.shape or np.all(np.isfinite(want)):
        return [compare(name, got, want, tolerance, scale)]
    kind = np.sign(np.nan_to_num(want, nan=0.0)) * ~np.isfinite(want)
    mine = np.sign(np.nan_to_num(got, nan=0.0)) * ~np.isfinite(got)
    finite = np.isfinite(want)
    return [
        compare(f"{name}: not finite", mine.astype(int), kind.astype(int), tolerance),
        compare(name, np.where(finite, got, 0.0), np.where(finite, want, 0.0), tolerance, scale),
    ]
