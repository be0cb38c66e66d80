"""Worker process of one measurement (`python -m linnet.bench.worker`): reads a task as JSON and writes its metrics as JSON.

Each measurement has its own process, so that peak memory and compile time are those of the job. JAX is imported after the cores are
chosen, because its thread pool has one thread per core.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from linnet.runs.environment import describe, keep_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from linnet.bench.measure import Benchmark
    from linnet.config.schema import RunConfig


def main(job: Callable[[dict[str, Any], RunConfig], dict[str, Any]] | None = None) -> None:
    """Run the task on stdin. `job` replaces `run_job`, for workers that know more jobs."""
    task = json.load(sys.stdin)
    if task["cores"] is not None:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: task["cores"]]))
    if task["job"] == "prior-train":  # as `linnet train` does
        keep_memory()
    print(json.dumps(run_task(task, job or run_job)))


def run_task(task: dict[str, Any], job: Callable[[dict[str, Any], RunConfig], dict[str, Any]]) -> dict[str, Any]:
    """Run a task and return its metrics, or `{"stopped": reason}` if the job does not fit into memory."""
    import jax

    from linnet.bench.measure import TooLarge
    from linnet.config.codec import run_from_dict

    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured cold
    cfg = run_from_dict(task["config"])
    environment = describe()
    where = {"cores": environment["cores_usable"], "commit": environment.pop("git_commit"), "machine": environment}
    try:
        figures = job(task, cfg)
    except TooLarge as stop:
        return {"stopped": str(stop), **where}
    return {**figures, **where}


def run_job(task: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """Run the job. Imports are local, because unneeded modules would count towards the job's memory."""
    if task["job"].startswith("serve-"):
        from linnet.bench.serve_jobs import SERVE_JOBS

        return SERVE_JOBS[task["job"]](cfg, seconds=task["seconds"], gemm_size=task["gemm_size"])
    if task["job"].startswith("prior-"):
        from linnet.bench.prior_jobs import prior_job

        return measure_benchmark(prior_job(task["job"], cfg), task)
    from linnet.bench.jobs import JOBS

    return measure_benchmark(JOBS[task["job"]](cfg), task)


def measure_benchmark(benchmark: Benchmark, task: dict[str, Any]) -> dict[str, Any]:
    from linnet.bench.measure import measure

    return measure(benchmark, seconds=task["seconds"], long_once=task["long_once"], gemm_size=task["gemm_size"])


if __name__ == "__main__":
    main()
