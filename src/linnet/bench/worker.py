"""The process of one measurement: a task as JSON comes in, its figures as JSON go out (`python -m linnet.bench.worker`).

A process of its own makes peak memory and compile time the job's alone. Nothing of JAX is loaded before the cores are chosen,
for its thread pool is as large as they are many.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from linnet.runs.environment import describe, keep_memory

if TYPE_CHECKING:
    from linnet.config.schema import RunConfig


def main() -> None:
    task = json.load(sys.stdin)
    if task["cores"] is not None:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: task["cores"]]))
    if task["job"] == "prior-train":  # as `linnet train` does
        keep_memory()
    print(json.dumps(run_task(task)))


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """`{"stopped": why}` in place of figures when the job does not fit into memory."""
    import jax

    from linnet.bench.measure import TooLarge
    from linnet.config.codec import run_from_dict

    jax.config.update("jax_enable_compilation_cache", False)  # compile time is measured cold
    cfg = run_from_dict(task["config"])
    environment = describe()
    where = {"cores": environment["cores_usable"], "commit": environment.pop("git_commit"), "machine": environment}
    try:
        figures = _figures(task, cfg)
    except TooLarge as stop:
        return {"stopped": str(stop), **where}
    return {**figures, **where}


def _figures(task: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """Each job brings in only what it needs: the rest would count as its memory."""
    seconds, gemm_size = task["seconds"], task["gemm_size"]
    if task["job"].startswith("serve-"):
        from linnet.bench.serve_jobs import SERVE_JOBS

        return SERVE_JOBS[task["job"]](cfg, seconds=seconds, gemm_size=gemm_size)
    if task["job"] == "import":
        from linnet.bench.import_memory import import_memory

        return import_memory(cfg)
    from linnet.bench.measure import measure

    if task["job"].startswith("prior-"):
        from linnet.bench.prior_jobs import prior_job

        job = prior_job(task["job"], cfg)
    else:
        from linnet.bench.jobs import JOBS

        job = JOBS[task["job"]](cfg)
    return measure(job, seconds=seconds, long_once=task["long_once"], gemm_size=gemm_size)


if __name__ == "__main__":
    main()
