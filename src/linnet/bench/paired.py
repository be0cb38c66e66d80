"""Interleaved measurement of two rates. A temporary slowdown of the machine affects both, so the median of their ratios is stable."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from linnet.bench.measure import Benchmark, Gemm, Span, time_call

TURNS = 3
QUIET_SECONDS, MAX_WAIT_SECONDS = 0.003, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplePoint:
    tokens: float
    seconds: float
    cpu_seconds: float


def sample_point(count: Callable[[], float]) -> SamplePoint:
    """Sample the token count just after a delivery. The tokens of all slots arrive at once, so a count at any other moment is off by
    up to one dispatch."""
    until, seen, since, changed = time.perf_counter() + MAX_WAIT_SECONDS, count(), time.perf_counter(), False
    while (now := time.perf_counter()) < until:
        time.sleep(0.001)
        n = count()
        if n != seen:
            seen, since, changed = n, time.perf_counter(), True
        elif changed and now - since > QUIET_SECONDS:
            break
    return SamplePoint(tokens=seen, seconds=since, cpu_seconds=time.process_time())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    tokens_per_second: float
    tokens_per_cpu_second: float


def rate(tokens: float, span: Span) -> Rate:
    return Rate(
        tokens_per_second=tokens / max(span.seconds, 1e-9), tokens_per_cpu_second=tokens / max(span.cpu_seconds, 1e-9)
    )


def rate_between(first: SamplePoint, last: SamplePoint) -> Rate:
    span = Span(last.seconds - first.seconds, last.cpu_seconds - first.cpu_seconds)
    return rate(last.tokens - first.tokens, span)


def raw_rate(job: Benchmark, seconds: float) -> Rate:
    """Return the rate of a job over as many runs as fit into the time."""
    n = 0

    def several() -> None:
        nonlocal n
        until = time.perf_counter() + seconds
        while not n or time.perf_counter() < until:
            job.run()
            n += 1

    span = time_call(several)
    return rate(n * job.tokens, span)


def interleave(
    a: Callable[[float], Rate], b: Callable[[float], Rate], *, each: float, n: int, gemm: Gemm
) -> tuple[Rate, Rate]:
    """Return the medians of a and of a / b over `n` turns, in which each is measured for `each` seconds."""
    pairs: list[tuple[Rate, Rate]] = []
    for _ in range(n):
        gemm.measure()
        pairs.append((a(each), b(each)))

    def median(of: Callable[[Rate, Rate], Rate]) -> Rate:
        got = [of(*pair) for pair in pairs]
        names = [field.name for field in dataclasses.fields(Rate)]
        return Rate(**{name: statistics.median(getattr(one, name) for one in got) for name in names})

    def ratio(a: Rate, b: Rate) -> Rate:
        return Rate(
            tokens_per_second=a.tokens_per_second / b.tokens_per_second,
            tokens_per_cpu_second=a.tokens_per_cpu_second / b.tokens_per_cpu_second,
        )

    return median(lambda a, _: a), median(ratio)
