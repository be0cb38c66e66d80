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


@dataclasses.dataclass(frozen=True)
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


# fmt: off
TARGETS = (
    #      job       length  batch  reference  target  compile CPU-s, peak bytes
    Target("train",  2048,   2,     820,       1400,   20, 1.0e9),
    Target("train",  8192,   1,     769,       1400,   20, 1.5e9),
    Target("eval",   2048,   None,  4080,      6000),
    Target("decode", None,   1,     299,       1000),
    Target("decode", None,   8,     432,       1300),
)
MOE_TARGETS = (
    Target("decode",  None, 1, 4.0,     40),
    Target("decode",  None, 8, 25,      150),
    Target("prefill", 512,  1, 93,      900),
    # A short prompt should have the rate of the row above. The reference pads 64 tokens to 1,024, which takes 11 CPU-seconds.
    Target("prefill", 64,   1, 64 / 11, 900),
)
PRIOR_TARGETS = (
    Target("train",   0,  64, 105,  130),
    Target("train",   77, 16, 6.4,  9),
    Target("ddim-64", 0,  64, 5.4,  7),
    # The reference has no such solver; this is its rate with DDIM in 64 steps.
    Target("dpm-16",  0,  64, 5.4,  25),
    Target("ddim-64", 77, 16, 0.27, 4),
)
# fmt: on
CORES_SPEEDUP = 1.7
"""Target speed-up of training on two cores over one."""
DENSE_RATIOS = {8192: 3.0, 32768: 12.0}
"""Target ratio of the rates of linear and dense attention, by sequence length."""
MIN_SHARE = 0.9
"""Target ratio of the rates at sequence lengths 65,536 and 2,048."""


_BY_PRESET = {PRESET: TARGETS, MOE_PRESET: MOE_TARGETS, PRIOR_PRESET: PRIOR_TARGETS}


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """Compare a result with its target. Returns an empty dict if there is no target of its shape."""
    target = find_target(result)
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


def find_target(result: dict[str, Any]) -> Target | None:
    matches = (
        t
        for t in _BY_PRESET.get(result["preset"], ())
        if t.job == result["job"]
        and t.sequence_len in (None, result["sequence_len"])
        and t.batch in (None, result["batch"])
    )
    return next(matches, None)
