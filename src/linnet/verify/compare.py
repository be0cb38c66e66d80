"""Compare arrays, and summarise the comparison of a file."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

ZERO_TOLERANCE = 1e-6  # if all expected values are zero, there is no relative error


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    error: float
    """Largest error, relative to the largest expected value; for integers the number of differences."""
    passed: bool
    note: str = ""
    sign_flips: int | None = None
    """Sign flips of lion, counted separately from errors; None if not counted here."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    file: str
    kind: str
    tolerance: float
    checks: tuple[Check, ...]
    not_checked: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if all checks passed; False if nothing could be checked."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def worst(self) -> float:
        errors = [check.error for check in self.checks if check.sign_flips is None]
        return math.nan if any(math.isnan(e) for e in errors) else max(errors, default=math.nan)

    def _flips(self) -> dict[str, int]:
        counted = [check.sign_flips for check in self.checks if check.sign_flips is not None]
        return {"sign_flips": sum(counted)} if counted else {}

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "kind": self.kind,
            "passed": self.passed,
            "tolerance": self.tolerance,
            "worst": _number(self.worst),
            **self._flips(),
            "tensors": [
                {"name": c.name, "max_relative_error": _number(c.error), "passed": c.passed, "note": c.note}
                for c in self.checks
            ],
            "not_checked": [{"name": s.name, "reason": s.reason} for s in self.not_checked],
            "notes": list(self.notes),
        }


def compare(name: str, got: Any, expected: np.ndarray, tolerance: float, scale: float = 0.0) -> Check:
    """Compare two arrays. `scale`: lower bound of the reference magnitude, for a mean that nearly cancels."""
    got = np.asarray(got)
    if got.shape != expected.shape:
        return Check(name, math.inf, False, f"shape {got.shape}, expected {expected.shape}")
    if expected.dtype.kind in "iub":
        differ = int(np.sum(got != expected))
        return Check(name, float(differ), differ == 0, f"{differ} of {expected.size} differ" if differ else "equal")
    wide, want = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(wide == want, 0.0, np.abs(wide - want))
    error = float(np.max(difference, initial=0.0))
    size = max(float(np.max(np.abs(want), initial=0.0)), scale)
    if size == 0.0:
        return Check(name, error, error <= ZERO_TOLERANCE, "expected 0 throughout: absolute error")
    error = error / size
    return Check(name, error, error <= tolerance, _where(difference) if error > tolerance else "")


def add_note(check: Check, note: str) -> Check:
    return dataclasses.replace(check, note="; ".join(filter(None, (check.note, note))))


def _where(difference: np.ndarray) -> str:
    if difference.ndim == 0:
        return ""
    worst = np.unravel_index(int(np.argmax(np.nan_to_num(difference, nan=np.inf))), difference.shape)
    return f"worst at {tuple(int(i) for i in worst)}"


def _number(value: float) -> float | str:
    """Return a JSON value, because JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)
