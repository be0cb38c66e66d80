"""The in-process serving benchmarks: the engine compared with raw decoding, streams during a long prefill, and a long context."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from linnet.bench import jobs
from linnet.bench.load import N_SLOTS, Load, random_prompt, running_engine, submit_request
from linnet.bench.measure import Gemm, time_call
from linnet.bench.paired import TURNS, Rate, interleave, rate_between, raw_rate, sample_point
from linnet.bench.run import with_shape
from linnet.config.schema import RunConfig
from linnet.serve.engine import Engine
from linnet.serve.request import Event, Finished, TokensEvent

STREAMS = 7
"""Number of running streams while one more request is admitted."""
LONG_PROMPT = 32_768
FAR, NEAR = 65_536, 1_024
FOREVER = 2**30


def throughput(cfg: RunConfig, *, seconds: float, gemm_size: int) -> dict[str, Any]:
    """Measure the engine with all slots busy, relative to the `decode` job with the same batch size."""
    gemm, cfg = Gemm(gemm_size), with_shape(cfg, cfg.tokens.sequence_len, N_SLOTS)
    raw = jobs.decode(cfg)
    raw.compile()
    raw.run()
    params, buffers = jobs.fresh_weights(cfg)
    with running_engine(cfg, params, buffers, N_SLOTS) as engine:
        load = Load(engine)

        def served(seconds: float) -> Rate:
            load.start()
            load.feed(seconds / 5)  # until the waiting requests are prefilled too
            first = sample_point(lambda: engine.stats()["tokens_total"])
            load.feed(seconds)
            last = sample_point(lambda: engine.stats()["tokens_total"])
            load.stop()
            return rate_between(first, last)

        served(0.1)  # warm-up
        own, share = interleave(served, lambda s: raw_rate(raw, s), each=seconds / 2, n=2 * TURNS, gemm=gemm)
    return {
        "tokens_per_second": own.tokens_per_second,
        "tokens_per_cpu_second": own.tokens_per_cpu_second,
        "share_of_raw": share.tokens_per_second,
        "share_of_raw_cpu": share.tokens_per_cpu_second,
        **gemm.stats(),
    }


def pause(cfg: RunConfig, *, seconds: float, gemm_size: int, prompt: int = LONG_PROMPT) -> dict[str, Any]:
    """Measure the gaps between token deliveries of running streams during the prefill of a long prompt, and for as long without it.
    The longest of hundreds of gaps also contains noise of the machine, so the pause is what the prefill adds to the longest gap."""
    gemm = Gemm(gemm_size)
    gemm.measure()
    params, buffers = jobs.fresh_weights(cfg)
    with running_engine(cfg, params, buffers, N_SLOTS) as engine:
        chunk = _chunk_seconds(engine)
        deliveries: list[list[float]] = [[] for _ in range(STREAMS)]

        def record_times(times: list[float]) -> Callable[[Event], None]:
            return lambda event: times.append(time.perf_counter()) if isinstance(event, TokensEvent) else None

        ids = [
            submit_request(engine, random_prompt(16, i), FOREVER, record_times(times))
            for i, times in enumerate(deliveries)
        ]
        while min(map(len, deliveries)) < 5:
            time.sleep(0.01)
        ended: queue.Queue[Event] = queue.Queue()
        admitted_from = time.perf_counter()
        submit_request(
            engine, random_prompt(prompt, STREAMS), 1, lambda e: ended.put(e) if isinstance(e, Finished) else None
        )
        end = ended.get(timeout=600.0)
        admitted_to = time.perf_counter()
        time.sleep(max(seconds, 0.5, admitted_to - admitted_from))
        idle_to = time.perf_counter()
        for id in ids:
            engine.cancel(id)
    assert isinstance(end, Finished)
    assert end.reason == "length", end
    idle, others = (
        delivery_gaps(deliveries, admitted_to, idle_to),
        delivery_gaps(deliveries, admitted_from, admitted_to),
    )
    added = max(0.0, max(others) - max(idle))
    return {
        "prompt": prompt,
        "chunk_seconds": chunk,
        "admission_seconds": admitted_to - admitted_from,
        "idle_median_seconds": float(np.median(idle)),
        "idle_p95_seconds": float(np.percentile(idle, 95)),
        "idle_longest_seconds": max(idle),
        "p95_seconds": float(np.percentile(others, 95)),
        "longest_seconds": max(others),
        "pause_seconds": added,
        "pause_in_chunks": added / chunk,
        "p95_over_idle": float(np.percentile(others, 95) / np.percentile(idle, 95)),
        **gemm.stats(),
    }


def delivery_gaps(deliveries: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Return the gaps between consecutive deliveries of each stream that end in this interval, including those open at its end."""
    gaps: list[float] = []
    for times in deliveries:
        earlier = [t for t in times if t < end]
        gaps += [b - a for a, b in zip(earlier, [*earlier[1:], end], strict=True) if b > start]
    return gaps


def _chunk_seconds(engine: Engine) -> float:
    """Return the time to prefill one full chunk on an idle engine."""
    backend, tokens = engine.backend, list(random_prompt(engine.backend.chunk_len, 0))
    memory = jax.block_until_ready(backend.prefill_chunk(backend.empty_memory(), tokens))
    spans = [time_call(lambda: jax.block_until_ready(backend.prefill_chunk(memory, tokens))) for _ in range(9)]
    return statistics.median(span.seconds for span in spans)


def context(
    cfg: RunConfig, *, seconds: float, gemm_size: int, lengths: tuple[int, int] = (FAR, NEAR)
) -> dict[str, Any]:
    """Measure decoding after a long context, relative to decoding after a short one."""
    gemm = Gemm(gemm_size)
    far, near = (jobs.decode(with_shape(cfg, length, 1)) for length in lengths)
    for job in (far, near):
        job.compile()
        job.run()
    own, share = interleave(lambda s: raw_rate(far, s), lambda s: raw_rate(near, s), each=seconds / 10, n=5, gemm=gemm)
    return {
        "context": lengths[0],
        "tokens_per_second": own.tokens_per_second,
        "tokens_per_cpu_second": own.tokens_per_cpu_second,
        "share_of_near": share.tokens_per_second,
        "share_of_near_cpu": share.tokens_per_cpu_second,
        "state_bytes": far.extra(1.0)["state_bytes"],
        "near_state_bytes": near.extra(1.0)["state_bytes"],
        **gemm.stats(),
    }


SERVE_JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "serve-engine": throughput,
    "serve-pause": pause,
    "serve-context": context,
}
