"""Worker process of one measurement (`python -m benchmarks.worker`): the jobs of this folder, beside those of `linnet.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnet.bench import run, worker
from linnet.config.schema import RunConfig


def measure_in_subprocess(job: str, cfg: RunConfig, **options: Any) -> dict[str, Any]:
    """Measure in a separate process that knows the jobs of this folder."""
    return run.measure_in_subprocess(job, cfg, module="benchmarks.worker", folder=Path(__file__).parents[1], **options)


def run_job(task: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """Run the job. Imports are local, because unneeded modules would count towards the job's memory."""
    match task["job"]:
        case "import":
            from benchmarks.import_memory import import_memory

            return import_memory(cfg)
        case "serve-http":
            from benchmarks.serve_http import over_http

            return over_http(cfg, seconds=task["seconds"], gemm_size=task["gemm_size"])
        case "train-dense" | "eval-dense":
            from benchmarks.dense_model import DENSE_JOBS

            return worker.measure_benchmark(DENSE_JOBS[task["job"]](cfg), task)
        case _:
            return worker.run_job(task, cfg)


if __name__ == "__main__":
    worker.main(run_job)
