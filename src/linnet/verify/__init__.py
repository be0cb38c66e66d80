"""`linnet verify`: run this implementation on a reference file and report the largest error of every tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from linnet.core.errors import UserError, invalid
from linnet.models.vq.convert import unknown_settings
from linnet.verify.compare import Check, Skipped, Verification, compare
from linnet.verify.golden import Golden, read_golden
from linnet.verify.golden_grok import grok_layout
from linnet.verify.grok import verify_grok
from linnet.verify.official_vq import official_layout, verify_official
from linnet.verify.prior import is_prior, verify_prior
from linnet.verify.replay import (
    Replay,
    replay_carry,
    replay_decode,
    replay_eval,
    replay_forward,
    replay_grads,
    replay_sample,
)
from linnet.verify.replay_prior import replay_legacy, replay_losses, replay_network, replay_network_parts
from linnet.verify.replay_prior_rules import (
    replay_ddim_times,
    replay_ema,
    replay_network_tables,
    replay_noise_ops,
    replay_noise_tables,
)
from linnet.verify.replay_prior_sampling import replay_sampling, replay_trainer
from linnet.verify.replay_rules import replay_nucleus, replay_schedule, replay_train

if TYPE_CHECKING:
    from rich.table import Table

REPLAYS = {
    "forward": replay_forward,
    "carry": replay_carry,
    "decode": replay_decode,
    "sample": replay_sample,
    "eval": replay_eval,
    "grads": replay_grads,
    "train": replay_train,
    "schedule": replay_schedule,
    "nucleus": replay_nucleus,
}
PRIOR_REPLAYS = {
    "noise_tables": replay_noise_tables,
    "noise_ops": replay_noise_ops,
    "ddim_times": replay_ddim_times,
    "network": replay_network,
    "network_parts": replay_network_parts,
    "network_tables": replay_network_tables,
    "network_legacy": replay_legacy,
    "losses": replay_losses,
    "sampling": replay_sampling,
    "trainer": replay_trainer,
    "ema": replay_ema,
}
INCONSISTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions of the computation for a damaged file with inconsistent shapes, types or settings."""
UNKNOWN = "not an output that Linnet knows"


def verify_file(path: Path | str, tolerance: float = 1e-5) -> Verification:
    """Verify a file: passes if every known tensor is within `tolerance`, relative to its largest value. Unknown tensors are listed."""
    if not tolerance > 0:
        raise invalid("tolerance", tolerance, "above 0", "use 1e-5")
    try:
        return _verified(path, tolerance)
    except UserError:
        raise
    except INCONSISTENT as error:
        raise UserError(
            f"{path} cannot be recomputed: its values do not fit together ({type(error).__name__}: {error}). Fix: write or copy the "
            "file again."
        ) from error


def _verified(path: Path | str, tolerance: float) -> Verification:
    official = official_layout(Path(path))
    if official is not None:
        return verify_official(official, named=str(path), tolerance=tolerance)
    grok = grok_layout(Path(path))
    if grok is not None:
        return verify_grok(*grok, named=str(path), tolerance=tolerance)
    if is_prior(Path(path)):
        return verify_prior(Path(path), PRIOR_REPLAYS, tolerance)
    golden = read_golden(Path(path))
    replay = REPLAYS[golden.kind](golden)
    wanted = {**golden.outputs, **replay.expected}
    checks = tuple(
        compare(name, replay.values[name], want, tolerance, replay.scales.get(name, 0.0))
        for name, want in wanted.items()
        if name in replay.values
    )
    not_checked = tuple(
        Skipped(name, replay.skipped.get(name, UNKNOWN)) for name in golden.outputs if name not in replay.values
    )
    return Verification(
        file=str(path),
        kind=golden.kind,
        tolerance=tolerance,
        checks=(*checks, *replay.checks),
        not_checked=not_checked,
        notes=_notes(golden),
    )


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


def _notes(golden: Golden) -> tuple[str, ...]:
    if not golden.params:
        return ()
    unknown = unknown_settings(golden.settings)
    return (f"settings not understood and not used: {', '.join(unknown)}",) if unknown else ()


__all__ = ["Check", "Golden", "Replay", "Skipped", "Verification", "render", "verify_file"]
