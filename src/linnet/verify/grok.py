"""Verify a Grok-1 reference file of any layout."""

from __future__ import annotations

from pathlib import Path

from linnet.verify.compare import Verification
from linnet.verify.golden_grok import Layout
from linnet.verify.positions import BFLOAT16, MEASURED_LAYERS
from linnet.verify.replay_grok import (
    INPUTS,
    Found,
    open_model,
    prefixes,
    replay_eager,
    replay_sequences,
    tolerance_of,
)
from linnet.verify.replay_grok_decode import replay_decoder, replay_runner
from linnet.verify.replay_grok_units import replay_order, replay_units

UNKNOWN = "not an output that Linnet knows"


def verify_grok(layout: Layout, path: Path, *, named: str, tolerance: float) -> Verification:
    found = Found()
    if layout == "forward":
        _forward(path, tolerance, found)
    elif layout == "units":
        replay_units(path, tolerance, found)
    elif layout == "runner":
        replay_runner(path, found)
    else:
        replay_order(path, found)
    return Verification(
        file=named,
        kind=f"grok {layout}",
        tolerance=tolerance,
        checks=tuple(found.checks),
        not_checked=tuple(found.skipped),
        notes=tuple(found.notes),
    )


def _forward(path: Path, tolerance: float, found: Found) -> None:
    m = open_model(path, found)
    seen = set(INPUTS)
    for prefix in prefixes(m):
        for replay in (replay_sequences, replay_eager, replay_decoder):
            seen |= {f"{prefix}/{name}" for name in replay(m, prefix, tolerance, found)}
        if prefix == "bf16":
            found.notes.append(
                f"bf16/ is compared within {BFLOAT16:g} up to {MEASURED_LAYERS} layers, and within {BFLOAT16:g} * "
                f"sqrt(layers / {MEASURED_LAYERS}) after more, since rounding adds up: "
                f"{tolerance_of(prefix, tolerance, m.cfg.n_layer):.3g} after all {m.cfg.n_layer}"
            )
    for name in m.arrays:
        if name not in seen:
            found.skip(name, UNKNOWN)
