"""`linnet bench serve`: the serving benchmarks of the engine, each in its own process, compared with their targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from linnet.bench.run import CONTEXT, check_seconds, measure_in_subprocess, measured_where, preset_config, with_shape
from linnet.bench.table import ResultTable
from linnet.bench.targets import GEMM_SIZE, PRESET
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.core.special_tokens import N_BYTE_IDS

JOBS = {
    "serve-engine": "engine throughput compared with raw decoding",
    "serve-pause": "running streams during the prefill of 32,768 tokens",
    "serve-context": "decoding at a context of 65,536 tokens compared with 1,024",
}
UNBOUNDED = ("serve-pause", "serve-context")
"""Jobs that need an unbounded context."""
Unit = Literal["share", "times", "chunks", "ms", "s"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One metric with its target."""

    metric: str
    value: float
    unit: Unit
    target: float
    at_least: bool
    """Whether the target is a minimum; otherwise it is a maximum."""
    also: bool = True
    """A further condition that must hold."""
    details: str
    """Details of the measurement."""

    @property
    def reached(self) -> bool:
        return self.also and (self.value >= self.target if self.at_least else self.value <= self.target)


def run_serve(
    preset: str | RunConfig = PRESET,
    *,
    seconds: float = 10.0,
    gemm_size: int = GEMM_SIZE,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    cfg = serving_config(preset)
    check_seconds(seconds)
    results: dict[str, dict[str, Any]] = {}
    for job, description in JOBS.items():
        if cfg.lm.context is not None and job in UNBOUNDED:
            log(f"{description}: skipped, because model.context is {cfg.lm.context}")
            continue
        log(description)
        results[job] = measure_in_subprocess(job, cfg, seconds=seconds, gemm_size=gemm_size)
    return summarise(cfg.preset, results, rows(results))


def serving_config(preset: str | RunConfig) -> RunConfig:
    """Return the preset with the context and batch size of the serving benchmarks. It must read bytes."""
    cfg = preset_config(preset)
    if cfg.lm.n_vocab != N_BYTE_IDS:
        needs = f"a preset that reads bytes ({N_BYTE_IDS} ids): fresh weights come without a tokenizer"
        raise invalid("PRESET", f"{cfg.preset} ({cfg.lm.n_vocab} ids)", needs, f"use {PRESET}")
    room = cfg.lm.context
    return with_shape(cfg, CONTEXT if room is None else min(CONTEXT, room // 2), 1)


def summarise(preset: str, results: dict[str, dict[str, Any]], rows: Sequence[Row]) -> dict[str, Any]:
    where = measured_where(list(results.values())[-1])
    gemm = {job: one["gemm_gflops_per_cpu_second"] for job, one in results.items()}
    compared = [{**dataclasses.asdict(row), "reached": row.reached} for row in rows]
    return {"job": "serve", "preset": preset, "rows": compared, "gemm": gemm, "figures": results, **where}


def rows(results: dict[str, dict[str, Any]]) -> list[Row]:
    kinds = {"serve-engine": _engine, "serve-pause": _pause, "serve-context": _context}
    return [row for job, result in results.items() for row in kinds[job](result)]


def _engine(r: dict[str, Any]) -> list[Row]:
    details = f"{r['tokens_per_second']:,.0f} tokens / s; by CPU time {r['share_of_raw_cpu']:.1%}"
    return [at_least("engine with 8 slots, relative to raw decoding", r["share_of_raw"], 0.9, details)]


def _pause(r: dict[str, Any]) -> list[Row]:
    longest = (
        f"longest gap {format_ms(r['longest_seconds'])} (undisturbed: median {format_ms(r['idle_median_seconds'])}, longest "
        f"{format_ms(r['idle_longest_seconds'])}); one chunk takes {format_ms(r['chunk_seconds'])}"
    )
    p95 = f"{format_ms(r['p95_seconds'])}, undisturbed {format_ms(r['idle_p95_seconds'])}; prefill in {r['admission_seconds']:.1f} s"
    during = f"during a prefill of {r['prompt']:,} tokens"
    return [
        at_most(f"increase of other streams' longest gap {during}", r["pause_in_chunks"], "chunks", 2.0, longest),
        at_most(f"p95 of other streams' gaps {during}, relative to undisturbed", r["p95_over_idle"], "times", 3.0, p95),
    ]


def _context(r: dict[str, Any]) -> list[Row]:
    details = (
        f"{r['tokens_per_cpu_second']:,.0f} tokens / CPU-s; by wall time {r['share_of_near']:.1%}; state "
        f"{r['state_bytes']:,} and {r['near_state_bytes']:,} bytes"
    )
    metric = f"decoding at a context of {r['context']:,}, relative to 1,024 (CPU time)"
    row = at_least(metric, r["share_of_near_cpu"], 0.95, details)
    return [dataclasses.replace(row, also=r["state_bytes"] == r["near_state_bytes"])]


def at_least(metric: str, value: float, target: float, details: str) -> Row:
    return Row(metric=metric, value=value, unit="share", target=target, at_least=True, details=details)


def at_most(metric: str, value: float, unit: Unit, target: float, details: str) -> Row:
    return Row(metric=metric, value=value, unit=unit, target=target, at_least=False, details=details)


def format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def serve_table(result: dict[str, Any]) -> ResultTable:
    gemm = ", ".join(f"{value:.1f} ({job.removeprefix('serve-')})" for job, value in result["gemm"].items())
    note = f"The reference matmul in the process of each job, in GFLOP / CPU-s: {gemm}."
    return ResultTable(result, COLUMNS, [_cells(row) for row in result["rows"]], [note])


COLUMNS = ("metric", "measured", "target", "reached", "details")


def _cells(row: dict[str, Any]) -> list[str]:
    bound = "at least" if row["at_least"] else "at most"
    value, target = (format_value(row[name], row["unit"]) for name in ("value", "target"))
    return [row["metric"], value, f"{bound} {target}", "yes" if row["reached"] else "no", row["details"]]


def format_value(value: float, unit: Unit) -> str:
    match unit:
        case "share":
            return f"{value:.1%}"
        case "times":
            return f"{value:.2f}x"
        case "chunks":
            return f"{value:.2f} chunks"
        case "ms":
            return format_ms(value)
        case "s":
            return f"{value:.1f} s"
