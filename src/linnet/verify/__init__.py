"""`linnet verify`: run this implementation on a reference file and report the largest error of every tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from linnet.core.errors import UserError, invalid
from linnet.verify.compare import Check, Skipped, Verification
from linnet.verify.golden import read_family
from linnet.verify.moe.files import grok_layout
from linnet.verify.moe.verify import verify_grok
from linnet.verify.prior.verify import verify_prior
from linnet.verify.vq.released import official_layout, verify_official
from linnet.verify.vq.verify import verify_vq

if TYPE_CHECKING:
    from rich.table import Table

INCONSISTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions of the computation for a damaged file with inconsistent shapes, types or settings."""


def verify_file(path: Path | str, tolerance: float = 1e-5) -> Verification:
    """Verify a file: passes if every known tensor is within `tolerance`, relative to its largest value. Unknown tensors are listed."""
    if not tolerance > 0:
        raise invalid("tolerance", tolerance, "above 0", "use 1e-5")
    try:
        return _verify(Path(path), tolerance)
    except UserError:
        raise
    except INCONSISTENT as error:
        raise UserError(
            f"{path} cannot be recomputed: its values do not fit together ({type(error).__name__}: {error}). Fix: write or copy the "
            "file again."
        ) from error


def _verify(path: Path, tolerance: float) -> Verification:
    official = official_layout(path)
    if official is not None:
        return verify_official(official, named=str(path), tolerance=tolerance)
    grok = grok_layout(path)
    if grok is not None:
        return verify_grok(*grok, named=str(path), tolerance=tolerance)
    verify = verify_prior if read_family(path) == "prior" else verify_vq
    return verify(path, tolerance)


def render(verification: Verification) -> Table:
    """Return a table for the terminal: failures first, then by size of error."""
    from rich.table import Table
    from rich.text import Text

    v = verification
    word = "passed" if v.passed else "FAILED"
    title = f"{v.file} ({v.kind}): {word}, {len(v.checks)} tensors within {v.tolerance:g}"
    if not v.passed:
        n_bad = sum(not check.passed for check in v.checks)
        title = f"{v.file} ({v.kind}): {word}, {n_bad} of {len(v.checks)} tensors beyond {v.tolerance:g}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("largest relative error", justify="right")
    table.add_column("")
    table.add_column("note")
    for check in sorted(v.checks, key=lambda c: (c.passed, -c.error if c.error == c.error else -math.inf)):
        table.add_row(Text(check.name), f"{check.error:.2e}", "ok" if check.passed else "FAIL", Text(check.note))
    for skipped in v.not_checked:
        table.add_row(Text(f"not checked: {skipped.name}"), "", "-", Text(skipped.reason))
    table.caption = "; ".join(v.notes) or None
    return table


__all__ = ["Check", "Skipped", "Verification", "render", "verify_file"]
