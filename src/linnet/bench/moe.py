"""`linnet bench moe`: the mixture of experts with float32 and int8 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from linnet.bench.run import check_seconds, measure_in_subprocess, measured_where, preset_config, with_shape
from linnet.bench.table import ResultTable, throughput_table
from linnet.bench.targets import GEMM_SIZE, MOE_PRESET, compare
from linnet.config.schema import RunConfig
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.models.moe.config import MoEConfig

WEIGHTS: tuple[WeightDtype, ...] = ("float32", "int8")
SHORT_PARTS = 8
"""Ratio of the long prompt to the short one: 512 tokens to 64."""


def run_moe(
    preset: str | RunConfig = MOE_PRESET,
    *,
    seconds: float = 10.0,
    gemm_size: int = GEMM_SIZE,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    cfg = preset_config(preset)
    check_seconds(seconds)
    if "grok-hf" not in cfg.model.EXPORT_FORMATS:
        raise invalid("PRESET", cfg.preset, "a preset of the family moe", f"use {MOE_PRESET}")
    prompt = cfg.model_as(MoEConfig).context // 2
    rows: list[dict[str, Any]] = []

    def measure(job: str, length: int, batch: int, weights: WeightDtype) -> dict[str, Any]:
        log(f"{job}, {length:,} tokens, batch {batch}, {weights} weights")
        name = job if weights == "float32" else f"{job}-{weights}"
        result = measure_in_subprocess(name, with_shape(cfg, length, batch), seconds=seconds, gemm_size=gemm_size)
        result |= {"job": job, "weights": weights}
        rows.append(result | compare(result))
        return result

    for weights in WEIGHTS:
        for batch in (1, 8):
            measure("decode", prompt, batch, weights)
        long = measure("prefill", prompt, 1, weights)
        short = measure("prefill", prompt // SHORT_PARTS, 1, weights)
        rows[-1]["over_its_part"] = _cpu_seconds(short) / (_cpu_seconds(long) / SHORT_PARTS)
    measure("train", cfg.tokens.update_len, cfg.data.batch_size, "float32")
    return {"job": "moe", "preset": cfg.preset, "rows": rows, **measured_where(rows[-1])}


def _cpu_seconds(result: dict[str, Any]) -> float:
    """Return the CPU time per prompt."""
    return result["sequence_len"] / result["tokens_per_cpu_second"]


def moe_table(result: dict[str, Any]) -> ResultTable:
    return throughput_table(result["rows"], notes(result))


def notes(result: dict[str, Any]) -> list[str]:
    """Return notes on figures that are not in the table."""
    sentences: list[str] = []
    for row in result["rows"]:
        if "over_its_part" in row:
            took, context = 1e3 * _cpu_seconds(row), row["sequence_len"]
            sentences.append(
                f"With {row['weights']} weights, a prompt of {context} tokens takes {took:,.0f} CPU-ms, "
                f"{row['over_its_part']:.2f} times 1/{SHORT_PARTS} of the time for {context * SHORT_PARTS} tokens."
            )
    return sentences
