"""Verify a Transformer-VQ reference file of any kind."""

from __future__ import annotations

from pathlib import Path

from linnet.core.errors import UserError
from linnet.models.vq.convert import unknown_settings
from linnet.verify.compare import Verification
from linnet.verify.golden import read_golden
from linnet.verify.recomputed import verification
from linnet.verify.vq.model import (
    recompute_carry,
    recompute_decode,
    recompute_eval,
    recompute_forward,
    recompute_grads,
    recompute_sample,
)
from linnet.verify.vq.training import recompute_nucleus, recompute_schedule, recompute_train

KINDS = {
    "forward": recompute_forward,
    "carry": recompute_carry,
    "decode": recompute_decode,
    "sample": recompute_sample,
    "eval": recompute_eval,
    "grads": recompute_grads,
    "train": recompute_train,
    "schedule": recompute_schedule,
    "nucleus": recompute_nucleus,
}
GROUPS = ("params/", "in/", "out/")


def verify_vq(path: Path, tolerance: float) -> Verification:
    golden = read_golden(path, "vq", KINDS)
    for name in golden.arrays:
        if not name.startswith(GROUPS) or name in GROUPS:
            raise UserError(f"{path} has {name!r}, but names start with params/, in/ or out/. Fix: write it again.")
    if not golden.outputs:
        raise UserError(f"{path} has no 'out/..' arrays, so there is nothing to check. Fix: write it again.")
    recomputed = KINDS[golden.kind](golden)
    if golden.params and (unknown := unknown_settings(golden.settings)):
        recomputed.notes.append(f"settings not understood and not used: {', '.join(unknown)}")
    return verification(recomputed, golden.outputs, file=str(path), kind=golden.kind, tolerance=tolerance)
