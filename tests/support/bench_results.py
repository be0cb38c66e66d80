"""A benchmark's result, a task for its worker, and the text of its tables, for the tests of `linnet bench` and `benchmarks/`."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from linnet.bench import run
from linnet.config.codec import to_json
from linnet.config.schema import DataConfig, OptimConfig, RunConfig
from linnet.models.vq.config import VQConfig

TINY = RunConfig(
    preset="tiny",
    model=VQConfig(d_model=8, d_k=4, d_v=8, n_code=4, n_layer=1, block_len=8, mem_len=8),
    data=DataConfig(sequence_len=16, update_len=16, batch_size=2),
    optim=OptimConfig(name="lion", warmup_steps=0),
)


def result(**changes: Any) -> dict[str, Any]:
    """A result as `run_bench` gives it."""
    figures = {
        "job": "train", "preset": "bench-s", "sequence_len": 2048, "batch": 2, "tokens_per_second": 2000.0,
        "tokens_per_cpu_second": 1000.0, "spread": 0.02, "repetitions": 5, "seconds_per_run": 2.0, "compile_seconds": 8.0,
        "compile_cpu_seconds": 12.0, "peak_rss_bytes": 900_000_000, "flops_per_token": 3.6e7,
        "gemm_gflops_per_second": 150.0, "gemm_gflops_per_cpu_second": 85.0, "mfu": 0.5, "cores": 2, "commit": "a" * 40,
        "machine": {"cpu": "A processor", "cores_usable": 2, "memory_bytes": 2**34, "versions": {"jax": "0.10.2"}},
        "date": "2030-01-02 03:04 UTC",
    }  # fmt: skip
    return {**figures, **changes}


def text_of(renderable: Any) -> str:
    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(renderable)
    console.file.close()
    return console.export_text()


def tiny_task(job: str) -> dict[str, Any]:
    settings = json.loads(json.dumps(to_json(run.with_shape(TINY, 16, 2))))
    settings.pop("version")
    return {"job": job, "config": settings, "seconds": 0.01, "cores": None, "long_once": True, "gemm_size": 32}
