"""Measurement: compile without a cache, warm up, then repeat a benchmark with a reference matmul before, between and after runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from linnet.bench.targets import GEMM_SIZE
from linnet.runs.environment import memory_bytes, peak_rss_bytes

MIN_REPETITIONS = 5
MIN_SECONDS = 0.25
"""Minimum duration of a repetition. Shorter jobs are run several times, to reduce the effect of timer resolution and cold caches."""
MEMORY_SHARE = 0.8
"""Fraction of the memory available to this process; a job that needs more is not started."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Duration in wall time, and in CPU time over all threads of this process."""

    seconds: float
    cpu_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark. `compile` may return the compiled program, for its memory analysis. `run` executes it once and blocks."""

    tokens: int
    flops_per_token: float
    compile: Callable[[], Any]
    run: Callable[[], None]
    extra: Callable[[float], dict[str, Any]] = lambda _: {}
    """Returns further metrics, given the seconds per run."""


class TooLarge(Exception):
    """The compiled program needs more memory than is available."""


def time_call(run: Callable[[], Any]) -> Span:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Span(time.perf_counter() - wall, time.process_time() - cpu)


class Gemm:
    """The reference for machine speed: a float32 matmul, compiled before anything is measured."""

    def __init__(self, size: int = GEMM_SIZE) -> None:
        self._flops = 2.0 * size**3
        self._matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
        self._product = jax.jit(lambda x: x @ x)
        self._spans: list[Span] = []
        self._product(self._matrix).block_until_ready()

    def measure(self) -> None:
        self._spans.append(time_call(lambda: self._product(self._matrix).block_until_ready()))

    def stats(self) -> dict[str, float]:
        wall = statistics.median(span.seconds for span in self._spans)
        cpu = statistics.median(max(span.cpu_seconds, 1e-9) for span in self._spans)
        return {
            "gemm_gflops_per_second": self._flops / wall / 1e9,
            "gemm_gflops_per_cpu_second": self._flops / cpu / 1e9,
        }


def measure(job: Benchmark, *, seconds: float, long_once: bool = False, gemm_size: int = GEMM_SIZE) -> dict[str, Any]:
    """Return all metrics of a benchmark. With `long_once`, a job that takes longer than `seconds` is run only once."""
    gemm = Gemm(gemm_size)
    compiled: list[Any] = []
    compile_span = time_call(lambda: compiled.append(job.compile()))
    _check_memory(compiled[0])
    gemm.measure()
    warm_up = time_call(job.run)
    gemm.measure()
    spans = [warm_up]
    if not long_once or warm_up.seconds < seconds:
        times = max(1, math.ceil(MIN_SECONDS / max(warm_up.seconds, 1e-9)))
        spans = _repeat(job.run, times, seconds, gemm)
    rate, cpu_rate = (
        _median_rate(job.tokens, [getattr(s, unit) for s in spans]) for unit in ("seconds", "cpu_seconds")
    )
    cpu_rates = [job.tokens / span.cpu_seconds for span in spans]
    figures = gemm.stats()
    return {
        "tokens_per_second": rate,
        "tokens_per_cpu_second": cpu_rate,
        "spread": (max(cpu_rates) - min(cpu_rates)) / cpu_rate,
        "repetitions": len(spans),
        "seconds_per_run": job.tokens / rate,
        "compile_seconds": compile_span.seconds,
        "compile_cpu_seconds": compile_span.cpu_seconds,
        "peak_rss_bytes": own_peak_bytes(),
        "flops_per_token": job.flops_per_token,
        **figures,
        "mfu": job.flops_per_token * rate / (figures["gemm_gflops_per_second"] * 1e9),
        **job.extra(job.tokens / rate),
    }


def _repeat(run: Callable[[], None], times: int, seconds: float, gemm: Gemm) -> list[Span]:
    """Repeat until there are enough repetitions and enough time has passed. Each repetition is the mean of `times` runs."""

    def several() -> None:
        for _ in range(times):
            run()

    spans: list[Span] = []
    spent = 0.0
    while len(spans) < MIN_REPETITIONS or spent < seconds:
        span = time_call(several)
        gemm.measure()
        spent += span.seconds
        spans.append(Span(span.seconds / times, span.cpu_seconds / times))
    return spans


def _median_rate(tokens: int, seconds: list[float]) -> float:
    return tokens / statistics.median(max(s, 1e-9) for s in seconds)


def _check_memory(compiled: Any) -> None:
    """Raise if XLA's memory analysis exceeds the limit, instead of being killed by the system."""
    memory, limit = compiled and compiled.memory_analysis(), memory_bytes()
    if memory is None or limit is None:
        return
    needs = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    if needs > MEMORY_SHARE * limit:
        raise TooLarge(f"it needs {needs / 1e9:.1f} GB of memory, more than {MEMORY_SHARE:.0%} of {limit / 1e9:.1f} GB")


def own_peak_bytes() -> int:
    """Return the peak memory of this process. `ru_maxrss` is only the fallback, because on Linux it starts at the parent's value."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_rss_bytes()
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else peak_rss_bytes()
