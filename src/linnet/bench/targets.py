"""What `bench-s`, `bench-moe` and `bench-prior` should reach, as measured with the references on two cores.

The figures stand for a machine where a matrix product ran at 85 GFLOP a CPU-second.
A slower machine has a lower bar: rates are scaled by the matrix product of the same run. Compile time and memory are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

PRESET = "bench-s"
MOE_PRESET = "bench-moe"
PRIOR_PRESET = "bench-prior"
GEMM_SIZE = 2048
"""Rows and columns of the float32 matrix product that machines are compared by."""
REFERENCE_GEMM = 85.0
"""GFLOP a CPU-second of the machine that the targets stand for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    job: str
    sequence_len: int | None
    """None: whatever the context."""
    batch: int | None
    reference: float
    """Tokens a CPU-second of the reference; of the prior, samples."""
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
    # 64 tokens in 64 tokens' time: the rate of the row above. The reference reads 1,024 for them, in 11 CPU-seconds.
    Target(job="prefill", sequence_len=64, batch=1, reference=64 / 11, tokens_per_cpu_second=900),
)
PRIOR_TARGETS = (
    Target(job="train", sequence_len=0, batch=64, reference=105, tokens_per_cpu_second=130),
    Target(job="train", sequence_len=77, batch=16, reference=6.4, tokens_per_cpu_second=9),
    Target(job="ddim-64", sequence_len=0, batch=64, reference=5.4, tokens_per_cpu_second=7),
    # The reference has no such solver: its DDIM in 64 steps stands beside it.
    Target(job="dpm-16", sequence_len=0, batch=64, reference=5.4, tokens_per_cpu_second=25),
    Target(job="ddim-64", sequence_len=77, batch=16, reference=0.27, tokens_per_cpu_second=4),
)
CORES_SPEEDUP = 1.7
"""Training on two cores over training on one."""
DENSE_RATIOS = {8192: 3.0, 32768: 12.0}
"""Linear over dense, by sequence length."""
MIN_SHARE = 0.9
"""Tokens a second at 65,536 over those at 2,048."""


_OF_PRESET = {PRESET: TARGETS, MOE_PRESET: MOE_TARGETS, PRIOR_PRESET: PRIOR_TARGETS}


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """The target of a result and how near it comes; nothing when its shape is not one of the targets'."""
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
