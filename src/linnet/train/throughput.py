"""Peak FLOP/s of the device, and throughput and MFU of a run."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp


def matmul_flops(size: int = 1024, repeats: int = 5) -> tuple[float, float]:
    """Measure FLOPs per second and per CPU-second of a float32 matmul on the default device (best of `repeats`)."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    product(a).block_until_ready()
    wall, cpu = [], []
    for _ in range(repeats):
        cpu_start, start = time.process_time(), time.perf_counter()
        product(a).block_until_ready()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    work = 2.0 * size**3
    return work / min(wall), work / max(min(cpu), 1e-9)


class Meter:
    """Measures tokens per second, MFU and the fraction of time spent waiting for data, since the last reading."""

    def __init__(self, tokens_per_step: int, flops_per_token: float, peak_flops: float) -> None:
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_token, peak_flops
        self._waited, self._paused, self._start, self._steps = 0.0, 0.0, time.perf_counter(), 0

    def stepped(self, waited: float) -> None:
        self._steps += 1
        self._waited += waited

    def pause(self, seconds: float) -> None:
        """Exclude time that is not training: evaluation, samples, saving."""
        self._paused += seconds

    def read(self) -> dict[str, float]:
        now = time.perf_counter()
        elapsed = max(now - self._start - self._paused, 1e-9)
        rate = self._steps * self._tokens / elapsed
        figures = {
            "tokens_per_second": rate,
            "mfu": rate * self._flops / self._peak,
            "wait_share": self._waited / elapsed,
        }
        self._waited, self._paused, self._start, self._steps = 0.0, 0.0, now, 0
        return figures
