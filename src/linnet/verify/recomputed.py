"""The results that Linnet computed for a reference file, and their comparison with the file's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from linnet.verify.compare import Check, Skipped, Verification, add_note, compare

UNKNOWN = "not an output that Linnet knows"
RANDOM = "depends on the reference's random stream"


@dataclasses.dataclass(kw_only=True)
class Recomputed:
    """Results by the file's own names, so that names which nothing checks can be listed."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Expected values that are compared instead of the file's complete arrays."""
    inputs: frozenset[str] = frozenset()
    """Names outside of in/ and params/ that are not results."""
    scales: dict[str, float] = dataclasses.field(default_factory=dict)
    """Lower bound of the magnitude that an error is relative to, if larger than the largest expected value."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Reasons why names are not checked."""
    checks: list[Check] = dataclasses.field(default_factory=list)
    """Comparisons that were made while recomputing."""
    notes: list[str] = dataclasses.field(default_factory=list)
    in_float64: Callable[[], dict[str, Any]] | None = None
    """Evaluates values whose float32 rounding may exceed the tolerance in float64; called only if one does."""

    def compare(self, name: str, got: Any, want: np.ndarray, tolerance: float, note: str = "") -> None:
        """Compare a value that has a tolerance of its own."""
        self.checks.append(add_note(compare(name, got, want, tolerance), note))


def verification(
    recomputed: Recomputed,
    outputs: Mapping[str, np.ndarray] | None = None,
    *,
    file: str,
    kind: str,
    tolerance: float,
) -> Verification:
    """Compare the values with the file's outputs, and list the outputs that were not checked.

    Without `outputs`, everything was compared while recomputing, and the skipped names are listed.
    """
    r = recomputed
    unchecked = list(r.skipped)
    if outputs is None:
        outputs = {}
    else:
        outputs = {name: value for name, value in outputs.items() if name not in r.inputs}
        unchecked = [name for name in outputs if name not in r.values]
    checks: list[Check] = []
    for name, want in {**outputs, **r.expected}.items():
        if name in r.values:
            checks += _checks(name, np.asarray(r.values[name]), want, tolerance, r.scales.get(name, 0.0))
    return Verification(
        file=file,
        kind=kind,
        tolerance=tolerance,
        checks=(*_confirm_in_float64(checks, r, outputs, tolerance), *r.checks),
        not_checked=tuple(Skipped(name, r.skipped.get(name, UNKNOWN)) for name in unchecked),
        notes=tuple(r.notes),
    )


def _checks(name: str, got: np.ndarray, want: np.ndarray, tolerance: float, scale: float) -> list[Check]:
    """Compare infinities separately: next to them every error would look small."""
    if want.dtype.kind != "f" or got.shape != want.shape or np.all(np.isfinite(want)):
        return [compare(name, got, want, tolerance, scale)]
    finite = np.isfinite(want)
    return [
        compare(f"{name}: not finite", _infinities(got), _infinities(want), tolerance),
        compare(name, np.where(finite, got, 0.0), np.where(finite, want, 0.0), tolerance, scale),
    ]


def _infinities(values: np.ndarray) -> np.ndarray:
    """Return 1 and -1 for infinities, 2 for NaN, and 0 for finite values."""
    return np.where(np.isnan(values), 2, np.isposinf(values).astype(int) - np.isneginf(values))


def _confirm_in_float64(
    checks: list[Check], recomputed: Recomputed, outputs: Mapping[str, np.ndarray], tolerance: float
) -> list[Check]:
    """Compare failed values with a float64 evaluation.

    Two float32 programs that round differently may be further apart than either is from the exact value. In that case both are
    compared with the float64 value instead, each within the same tolerance.
    """
    if recomputed.in_float64 is None or all(check.passed for check in checks):
        return checks
    try:
        exact = recomputed.in_float64()
    except NotImplementedError:  # the float32 comparison stands
        return checks
    return [
        check
        if check.passed or check.name not in exact
        else _from_exact(check, recomputed.values[check.name], outputs[check.name], exact[check.name], tolerance)
        for check in checks
    ]


def _from_exact(check: Check, mine: Any, theirs: np.ndarray, exact: np.ndarray, tolerance: float) -> Check:
    file, own = (compare(check.name, value, exact, tolerance) for value in (theirs, mine))
    note = (
        f"both round in float32 and differ by {check.error:.2e}; relative to float64 the file is off by {file.error:.2e}, Linnet by "
        f"{own.error:.2e}"
    )
    return Check(check.name, max(file.error, own.error), file.passed and own.passed, note)
