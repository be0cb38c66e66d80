"""`linnet bench prior`: training and sampling of the diffusion prior, with and without text token encodings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from linnet.bench.run import check_seconds, measure_in_subprocess, measured_where, preset_config
from linnet.bench.table import SCALED, ResultTable
from linnet.bench.targets import GEMM_SIZE, PRIOR_PRESET, compare
from linnet.config.schema import PairsConfig, RunConfig
from linnet.core.errors import invalid

TEXT_LEN = 77
"""Token encodings per text, as in CLIP."""
SHAPES = (("train", 0, 64), ("train", TEXT_LEN, 16), ("ddim-64", 0, 64), ("dpm-16", 0, 64), ("ddim-64", TEXT_LEN, 16))
"""Job, number of token encodings and batch size of the targets."""
GROWTH = (("train", 0, 256), ("ddim-16", 0, 64), ("ddim-64", 0, 1), ("ddim-64", 0, 8), ("ddim-64", TEXT_LEN, 1))
"""Further shapes, which show how the cost grows with steps and batch size."""
COLUMNS = (
    "job", "samples / CPU-s", "target, scaled", "samples / s", "CPU-ms / sample", "compile CPU-s", "peak GB", "MFU",
    "GEMM GFLOP / CPU-s", "reached",
)  # fmt: skip


def run_prior(
    preset: str | RunConfig = PRIOR_PRESET,
    *,
    seconds: float = 10.0,
    gemm_size: int = GEMM_SIZE,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    check_seconds(seconds)
    cfg = preset_config(preset)
    if cfg.reads_tokens:
        raise invalid("PRESET", cfg.preset, "a preset of the family prior", f"use {PRIOR_PRESET}")
    rows: list[dict[str, Any]] = []
    for job, text_len, batch in (*SHAPES, *GROWTH):
        log(f"{job}, {text_len} encodings, batch {batch}")
        shape = _with_shape(cfg, text_len, batch)
        result = measure_in_subprocess(f"prior-{job}", shape, seconds=seconds, gemm_size=gemm_size)
        result |= {"job": job}
        rows.append(result | compare(result))
    return {"job": "prior", "preset": cfg.preset, "rows": rows, **measured_where(rows[0])}


def _with_shape(cfg: RunConfig, text_len: int, batch: int) -> RunConfig:
    model = dataclasses.replace(cfg.prior, text_encodings=text_len > 0, max_text_len=text_len)
    data, train = PairsConfig(batch_size=batch), dataclasses.replace(cfg.train, accumulate=1)
    return dataclasses.replace(cfg, model=model, data=data, train=train)


def prior_table(result: dict[str, Any]) -> ResultTable:
    return ResultTable(result, COLUMNS, [_cells(row) for row in result["rows"]], [SCALED, *notes(result)])


def _cells(row: dict[str, Any]) -> list[str]:
    rate = row["tokens_per_cpu_second"]
    return [
        f"{_title(row['job'])}, {row['sequence_len'] or 'no'} encodings, batch {row['batch']}",
        _short(rate),
        f"{row['target']:g}, {_short(row['target_scaled'])}" if "target" in row else "-",
        _short(row["tokens_per_second"]),
        f"{1e3 / rate:,.1f}",
        f"{row['compile_cpu_seconds']:.1f}",
        f"{row['peak_rss_bytes'] / 1e9:.2f}",
        f"{row['mfu']:.0%}",
        f"{row['gemm_gflops_per_cpu_second']:.1f}",
        ("yes" if row["reached"] else "no") if "reached" in row else "-",
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """Return notes on how the cost per sample grows."""
    took = {(r["job"], r["sequence_len"], r["batch"]): 1e3 / r["tokens_per_cpu_second"] for r in result["rows"]}

    def pair(few: tuple[str, int, int], many: tuple[str, int, int], compared: str) -> str:
        return f"{compared}: {took[few]:,.1f} and {took[many]:,.1f} CPU-ms per sample, {took[many] / took[few]:.2f} times as much."

    return [
        pair(("ddim-16", 0, 64), ("ddim-64", 0, 64), "16 and 64 steps of DDIM, batch 64"),
        pair(("ddim-64", 0, 1), ("ddim-64", 0, 8), "Batch 1 and 8"),
        pair(("ddim-64", 0, 1), ("ddim-64", 0, 64), "Batch 1 and 64"),
        pair(("train", 0, 64), ("train", 0, 256), "Training with batch 64 and 256"),
    ]


def _title(job: str) -> str:
    solver, _, steps = job.partition("-")
    names = {"ddim": "DDIM", "dpm": "DPM-Solver++"}
    return f"sample, {names[solver]}, {steps} steps" if steps else job


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
