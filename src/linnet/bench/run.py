"""`linnet bench JOB`: validate the request, measure in a new process, and compare with the targets."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linnet.bench.targets import GEMM_SIZE, PRESET, TARGETS, compare
from linnet.config import codec, presets
from linnet.config.schema import DataConfig, RunConfig
from linnet.core.errors import UserError, invalid
from linnet.models.model_config import PairModelConfig
from linnet.runs.environment import cores_usable

JOBS = ("train", "eval", "prefill", "decode")
CONTEXT = 1024
"""Default context of decode and prompt length of prefill, in tokens."""
TICKS = 64
"""Tokens that a slot generates per call."""


def run_bench(
    job: str,
    preset: str | RunConfig = PRESET,
    *,
    sequence_len: int | None = None,
    batch: int | None = None,
    seconds: float = 10.0,
    cores: int | None = None,
    compare_cores: bool = False,
    gemm_size: int = GEMM_SIZE,
) -> dict[str, Any]:
    """Return all metrics of one job as JSON values. `compare_cores` also measures on one core."""
    cfg = job_config(job, preset, sequence_len, batch)
    _check_time_and_cores(seconds, cores)
    if compare_cores and (cores or cores_usable()) < 2:
        raise invalid("--compare-cores", cores or cores_usable(), "used with two cores or more", "leave --cores out")
    result = measure_in_subprocess(job, cfg, seconds=seconds, cores=cores, gemm_size=gemm_size)
    if "stopped" in result:
        raise UserError(f"{job} cannot be measured: {result['stopped']}. Fix: a smaller --sequence-len or --batch.")
    result |= compare(result)
    if compare_cores:
        alone = measure_in_subprocess(job, cfg, seconds=seconds, cores=1, gemm_size=gemm_size)
        result["one_core_tokens_per_second"] = alone["tokens_per_second"]
        result["speedup_over_one_core"] = result["tokens_per_second"] / alone["tokens_per_second"]
    return result


def run_table(*, seconds: float = 10.0, log: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Measure every row of the targets, the first (training) also on one core, for the table in docs/benchmarks.md."""
    results: list[dict[str, Any]] = []
    for target in TARGETS:
        log(
            f"{target.job}, sequence length {target.sequence_len or CONTEXT:,}, batch {target.batch or 'of the preset'}"
        )
        compare_cores = not results and cores_usable() > 1 and hasattr(os, "sched_setaffinity")
        results.append(
            run_bench(
                target.job,
                sequence_len=target.sequence_len,
                batch=target.batch,
                seconds=seconds,
                compare_cores=compare_cores,
            )
        )
    return results


def preset_config(preset: str | RunConfig) -> RunConfig:
    return presets.get(preset) if isinstance(preset, str) else preset


def measured_where(result: dict[str, Any]) -> dict[str, Any]:
    """Return the date, commit and machine of a result, for a summary of several results."""
    return {name: result[name] for name in ("date", "commit", "machine", "cores")}


def job_config(job: str, preset: str | RunConfig, sequence_len: int | None, batch: int | None) -> RunConfig:
    """Return the preset with the requested length and batch size on the embedded corpus, or raise if they are invalid."""
    if job not in JOBS:
        raise invalid("the job", job, f"one of {', '.join(JOBS)}", "choose one of them")
    cfg = preset_config(preset)
    serving, room = job in ("prefill", "decode"), cfg.lm.context
    if room is not None and job == "decode":
        room -= TICKS
    usual = CONTEXT if room is None else min(CONTEXT, room)
    length, size = (usual, 1) if serving else (cfg.tokens.update_len, cfg.data.batch_size)
    length = length if sequence_len is None else sequence_len
    if room is not None and length > room:
        needs = f"at most {room}: model.context is {cfg.lm.context}{f', and {TICKS} are written' * (job == 'decode')}"
        raise invalid("--sequence-len", length, needs, f"use {room}")
    return with_shape(cfg, length, size if batch is None else batch)


def with_shape(cfg: RunConfig, length: int, batch: int) -> RunConfig:
    block = cfg.lm.update_multiple
    if batch < 1:
        raise invalid("--batch", batch, "at least 1", "use 1")
    if length < 1 or length % block:
        near = max(1, round(length / block)) * block
        raise invalid("--sequence-len", length, f"a positive multiple of model.block_len ({block})", f"use {near}")
    data = DataConfig(sequence_len=length, update_len=length, batch_size=batch)
    return dataclasses.replace(cfg, data=data, train=dataclasses.replace(cfg.train, accumulate=1))


def check_seconds(seconds: float) -> None:
    if not seconds > 0:
        raise invalid("--seconds", seconds, "above 0", "use 10")


def _check_time_and_cores(seconds: float, cores: int | None) -> None:
    check_seconds(seconds)
    if cores is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("--cores needs Linux: this system cannot bind a process to cores. Fix: leave --cores out.")
    if not 1 <= cores <= cores_usable():
        raise invalid(
            "--cores", cores, f"between 1 and {cores_usable()}, the cores usable here", f"use {cores_usable()}"
        )


def measure_in_subprocess(
    job: str,
    cfg: RunConfig,
    *,
    seconds: float,
    cores: int | None = None,
    long_once: bool = False,
    gemm_size: int = GEMM_SIZE,
    module: str = "linnet.bench.worker",
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure in a separate process. The result includes the job, its shape, the machine and the date.

    `module`: the worker, which is started in `folder` (where it is, if it is not installed).
    """
    settings = codec.to_json(cfg)
    settings.pop("version")
    task = {
        "job": job,
        "config": settings,
        "seconds": seconds,
        "cores": cores,
        "long_once": long_once,
        "gemm_size": gemm_size,
    }
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise _failure(job, cfg, done)
    return {
        "job": job,
        "preset": cfg.preset,
        "sequence_len": _length(cfg),
        "batch": cfg.data.batch_size,
        **json.loads(done.stdout.splitlines()[-1]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _length(cfg: RunConfig) -> int:
    """Return the tokens per sequence; for a prior, the token encodings per text."""
    return cfg.model.max_text_len if isinstance(cfg.model, PairModelConfig) else cfg.tokens.sequence_len


def _failure(job: str, cfg: RunConfig, done: subprocess.CompletedProcess[str]) -> Exception:
    what = f"{job} of {cfg.preset} at sequence length {_length(cfg)}, batch {cfg.data.batch_size}"
    if done.returncode < 0:
        return UserError(
            f"the measurement of {what} was killed by signal {-done.returncode}, most likely for lack of memory. "
            "Fix: a smaller --sequence-len or --batch."
        )
    return RuntimeError(f"the measurement of {what} failed:\n{done.stderr.strip()}")
