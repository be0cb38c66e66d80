"""Performance targets of `bench-s`, `bench-moe` and `bench-prior`, and the rates of the reference implementations on two cores.

The rates are for a machine on which a matmul runs at 85 GFLOP per CPU-second. On other machines they are scaled by the matmul rate
measured in the same run. Compile time and memory limits are not scaled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

PRESET = "bench-s"
MOE_PRESET = "bench-moe"
PRIOR_PRESET = "bench-prior"
GEMM_SIZE = 2048
"""Size of the square float32 matmul that machines are compared by."""
REFERENCE_GEMM = 85.0
"""GFLOP per CPU-second of the machine for which the targets are given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    job: str
    sequence_len: int | None
    """None: any length."""
    batch: int | None
    reference: float
    """Tokens (prior: samples) per CPU-second of the reference implementation."""
    tokens_per_cpu_second: float
    compile_cpu_seconds: float | None = None
    peak_rss_bytes: float | None = None


TARGETS = (
    Target(
        job="train",
        sequence_len=2048,
        batch=2,
        reference=820,
        tokens_per_cpu_second=1400,
        compile_cpu_seconds=20,
        peak_rss_bytes=1.0e9,
    ),
    Target(
        job="train",
        sequence_len=8192,
        batch=1,
        reference=769,
        tokens_per_cpu_second=1400,
        compile_cpu_seconds=20,
        peak_rss_bytes=1.5e9,
    ),
    Target(job="eval", sequence_len=2048, batch=None, reference=4080, tokens_per_cpu_second=6000),
    Target(job="decode", sequence_len=None, batch=1, reference=299, tokens_per_cpu_second=1000),
    Target(job="decode", sequence_len=None, batch=8, reference=432, tokens_per_cpu_second=1300),
)
MOE_TARGETS = (
    Target(job="decode", sequence_len=None, batch=1, reference=4.0, tokens_per_cpu_second=40),
    Target(job="decode", sequence_len=None, batch=8, reference=25, tokens_per_cpu_second=150),
    Target(job="prefill", sequence_len=512, batch=1, reference=93, tokens_per_cpu_second=900),
    # A short prompt should have the rate of the row above. The reference pads 64 tokens to 1,024, which takes 11 CPU-seconds.
    Target(job="prefill", sequence_len=64, batch=1, reference=64 / 11, tokens_per_cpu_second=900),
)
PRIOR_TARGETS = (
    Target(job="train", sequence_len=0, batch=64, reference=105, tokens_per_cpu_second=130),
    Target(job="train", sequence_len=77, batch=16, reference=6.4, tokens_per_cpu_second=9),
    Target(job="ddim-64", sequence_len=0, batch=64, reference=5.4, tokens_per_cpu_second=7),
    # The reference has no such solver; this is its rate with DDIM in 64 steps.
    Target(job="dpm-16", sequence_len=0, batch=64, reference=5.4, tokens_per_cpu_second=25),
    Target(job="ddim-64", sequence_len=77, batch=16, reference=0.27, tokens_per_cpu_second=4),
)
CORES_SPEEDUP = 1.7
"""Target speed-up of training on two cores over one."""
DENSE_RATIOS = {8192: 3.0, 32768: 12.0}
"""Target ratio of the rates of linear and dense attention, by sequence length."""
MIN_SHARE = 0.9
"""Target ratio of the rates at sequence lengths 65,536 and 2,048."""


_OF_PRESET = {PRESET: TARGETS, MOE_PRESET: MOE_TARGETS, PRIOR_PRESET: PRIOR_TARGETS}


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """Compare a result with its target. Returns an empty dict if there is no target of its shape."""
    target = find(result)
    if target is None:
        return {}
    scaled = target.tokens_per_cpu_second * result["gemm_gflops_per_cpu_second"] / REFERENCE_GEMM
    limits = {
        name: {"limit": limit, "reached": result[name] <= limit}
        for name in ("compile_cpu_seconds", "peak_rss_bytes")
        if (limit := getattr(target, name)) is not None
    }
    reached = result["tokens_per_cpu_second"] >= scaled
    return {
        "reference": target.reference,
        "target": target.tokens_per_cpu_second,
        "target_scaled": scaled,
        "target_ratio": result["tokens_per_cpu_second"] / scaled,
        "limits": limits,
        "reached": reached and all(limit["reached"] for limit in limits.values()),
    }


def find(result: dict[str, Any]) -> Target | None:
    fits = (
        t
        for t in _OF_PRESET.get(result["preset"], ())
        if t.job == result["job"]
        and t.sequence_len in (None, result["sequence_len"])
        and t.batch in (None, result["batch"])
    )
    return next(fits, None)
