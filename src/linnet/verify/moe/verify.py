"""Verify a Grok-1 reference file of any layout."""

from __future__ import annotations

from pathlib import Path

from linnet.verify.compare import Verification
from linnet.verify.moe.decoding import recompute_decoder, recompute_runner
from linnet.verify.moe.files import Layout
from linnet.verify.moe.positions import BFLOAT16, MEASURED_LAYERS
from linnet.verify.moe.sequences import (
    DTYPES,
    INPUTS,
    Variant,
    open_model,
    recompute_eager,
    recompute_sequences,
    tolerance_of,
)
from linnet.verify.moe.units import recompute_order, recompute_units
from linnet.verify.recomputed import UNKNOWN, Recomputed, verification


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
    return verification(recomputed, file=named, kind=f"grok {layout}", tolerance=tolerance)


def _recompute_forward(path: Path, tolerance: float, recomputed: Recomputed) -> None:
    m = open_model(path, recomputed)
    for prefix in DTYPES:
        variant = Variant(m, prefix, tolerance, recomputed)
        if not variant.expected:
            continue
        for recompute in (recompute_sequences, recompute_eager, recompute_decoder):
            recompute(variant)
        if prefix == "bf16":
            recomputed.notes.append(
                f"bf16/ is compared within {BFLOAT16:g} up to {MEASURED_LAYERS} layers, and within {BFLOAT16:g} * "
                f"sqrt(layers / {MEASURED_LAYERS}) after more, since rounding adds up: "
                f"{tolerance_of(prefix, tolerance, m.cfg.n_layer):.3g} after all {m.cfg.n_layer}"
            )
    known = {*INPUTS, *recomputed.skipped, *(check.name.removesuffix(": mask") for check in recomputed.checks)}
    recomputed.skipped |= {name: UNKNOWN for name in m.golden.arrays if name not in known}
