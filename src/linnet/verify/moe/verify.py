"""Verify a Grok-1 reference file of any layout."""

from __future__ import annotations

from pathlib import Path

from linnet.verify.compare import Skipped, Verification
from linnet.verify.moe.decoding import recompute_decoder, recompute_runner
from linnet.verify.moe.files import Layout
from linnet.verify.moe.positions import BFLOAT16, MEASURED_LAYERS
from linnet.verify.moe.sequences import (
    INPUTS,
    open_model,
    prefixes,
    recompute_eager,
    recompute_sequences,
    tolerance_of,
)
from linnet.verify.moe.units import recompute_order, recompute_units
from linnet.verify.recomputed import UNKNOWN, Recomputed


def verify_grok(layout: Layout, path: Path, *, named: str, tolerance: float) -> Verification:
    recomputed = Recomputed()
    match layout:
        case "forward":
            _recompute_forward(path, tolerance, recomputed)
        case "units":
            recompute_units(path, tolerance, recomputed)
        case "runner":
            recompute_runner(path, recomputed)
        case "order":
            recompute_order(path, recomputed)
    return Verification(
        file=named,
        kind=f"grok {layout}",
        tolerance=tolerance,
        checks=tuple(recomputed.checks),
        not_checked=tuple(Skipped(*item) for item in recomputed.skipped.items()),
        notes=tuple(recomputed.notes),
    )


def _recompute_forward(path: Path, tolerance: float, recomputed: Recomputed) -> None:
    m = open_model(path, recomputed)
    seen = set(INPUTS)
    for prefix in prefixes(m):
        for recompute in (recompute_sequences, recompute_eager, recompute_decoder):
            seen |= {f"{prefix}/{name}" for name in recompute(m, prefix, tolerance, recomputed)}
        if prefix == "bf16":
            recomputed.notes.append(
                f"bf16/ is compared within {BFLOAT16:g} up to {MEASURED_LAYERS} layers, and within {BFLOAT16:g} * "
                f"sqrt(layers / {MEASURED_LAYERS}) after more, since rounding adds up: "
                f"{tolerance_of(prefix, tolerance, m.cfg.n_layer):.3g} after all {m.cfg.n_layer}"
            )
    recomputed.skipped |= {name: UNKNOWN for name in m.arrays if name not in seen}
