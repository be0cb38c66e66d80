"""Verify a prior's reference file of any kind."""

from __future__ import annotations

from pathlib import Path

from linnet.verify.compare import Verification
from linnet.verify.golden import read_golden
from linnet.verify.prior.network import (
    recompute_legacy,
    recompute_losses,
    recompute_network,
    recompute_network_parts,
)
from linnet.verify.prior.sampling import recompute_sampling, recompute_trainer
from linnet.verify.prior.tables import (
    recompute_ddim_times,
    recompute_ema,
    recompute_network_tables,
    recompute_noise_ops,
    recompute_noise_tables,
)
from linnet.verify.recomputed import verification

KINDS = {
    "noise_tables": recompute_noise_tables,
    "noise_ops": recompute_noise_ops,
    "ddim_times": recompute_ddim_times,
    "network": recompute_network,
    "network_parts": recompute_network_parts,
    "network_tables": recompute_network_tables,
    "network_legacy": recompute_legacy,
    "losses": recompute_losses,
    "sampling": recompute_sampling,
    "trainer": recompute_trainer,
    "ema": recompute_ema,
}
INPUTS = ("in/", "params/", "sd_")


def verify_prior(path: Path, tolerance: float) -> Verification:
    golden = read_golden(path, "prior", KINDS)
    outputs = {
        name: value for name, value in golden.arrays.items() if not name.startswith(INPUTS) and value.dtype.kind != "U"
    }
    return verification(KINDS[golden.kind](golden), outputs, file=str(path), kind=golden.kind, tolerance=tolerance)
