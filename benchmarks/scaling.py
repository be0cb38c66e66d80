"""Tokens per second by sequence length, compared with dense attention in the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Output, log, run_command
from benchmarks.worker import measure_in_subprocess
from linnet.bench.run import preset_config, with_shape
from linnet.bench.table import ResultTable
from linnet.bench.targets import DENSE_RATIOS, GEMM_SIZE, MIN_SHARE, PRESET
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid
from linnet.core.files import atomic_write
from linnet.report.charts import Series, line_chart

SHORTEST, LONGEST = 512, 65_536
BASE_LEN = 2048
"""Reference length for the ratios."""


def lengths_up_to(longest: int = LONGEST) -> list[int]:
    if longest < SHORTEST:
        raise invalid("--max-sequence-len", longest, f"at least {SHORTEST}", f"use {LONGEST}")
    return [SHORTEST << i for i in range((longest // SHORTEST).bit_length())]


def run_scaling(
    preset: str | RunConfig = PRESET,
    lengths: Sequence[int] | None = None,
    *,
    job: str = "train",
    seconds: float = 5.0,
    time_limit: float = 300.0,
    out: Path,
    gemm_size: int = GEMM_SIZE,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure every length with both kinds of attention at batch size 1, each in its own process, and write the plot to `out`. A
    curve ends at a length at which one run would take longer than `time_limit` seconds or more memory than available; the result
    includes the reason."""
    from benchmarks import dense_model

    cfg = preset_config(preset)
    if job not in ("train", "eval"):
        raise invalid("the job of scaling", job, "train or eval", "use train")
    if out.suffix != ".svg" or not out.parent.is_dir():
        raise invalid("--out", str(out), "an .svg file in a folder that exists", "use scaling.svg")
    dense_model.check(cfg.vq)
    cfg = _without_dropout(cfg)
    configs = {length: with_shape(cfg, length, 1) for length in sorted(lengths or lengths_up_to())}
    curves: dict[str, list[dict[str, Any]]] = {}
    stops: dict[str, str] = {}
    for kind, name, growth in (("linear", job, 1.0), ("dense", f"{job}-dense", 2.0)):

        def measure(length: int, kind: str = kind, name: str = name) -> dict[str, Any]:
            log(f"{kind} attention, {length:,} tokens")
            return measure_in_subprocess(name, configs[length], seconds=seconds, long_once=True, gemm_size=gemm_size)

        curves[kind], why = _curve(measure, list(configs), growth, time_limit)
        if why is not None:
            stops[kind] = why
            log(f"{kind} attention: {why}")
    result = summarise(job, cfg.preset, curves, stops)
    atomic_write(out, plot(result).encode())
    return {**result, "plot": str(out)}


def _without_dropout(cfg: RunConfig) -> RunConfig:
    names = ("p_dropemb", "p_dropsin", "p_dropres", "p_droplyr")
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **dict.fromkeys(names, 0.0)))


def _curve(
    measure: Callable[[int], dict[str, Any]], lengths: Sequence[int], growth: float, limit: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the measured points, and why the curve ended early, if so."""
    points: list[dict[str, Any]] = []
    for length in lengths:
        # The extrapolation only decides whether to measure a point; it is never reported.
        last = points[-1] if points else {"seconds_per_run": 0.0, "sequence_len": length}
        if last["seconds_per_run"] * (length / last["sequence_len"]) ** growth > limit:
            return (
                points,
                f"not measured from {length:,} tokens on, because one run would take longer than {limit:g} seconds",
            )
        point = measure(length)
        if "stopped" in point:
            return points, f"not measured from {length:,} tokens on, because {point['stopped']}"
        points.append(point)
    return points, None


def summarise(job: str, preset: str, curves: dict[str, list[dict[str, Any]]], stops: dict[str, str]) -> dict[str, Any]:
    """Return one row per length. Ratios use rates per CPU-second, which are least affected by other load on the machine."""
    by_length = {kind: {point["sequence_len"]: point for point in points} for kind, points in curves.items()}
    base = by_length["linear"].get(BASE_LEN)
    rows: list[dict[str, Any]] = []
    for length in sorted(set().union(*by_length.values())):
        linear, dense = (by_length[kind].get(length) for kind in ("linear", "dense"))
        row = {"sequence_len": length, "linear": linear, "dense": dense}
        if linear and dense:
            row["linear_over_dense"] = _rate(linear) / _rate(dense)
            row["linear_over_dense_wall"] = linear["tokens_per_second"] / dense["tokens_per_second"]
            row["target_linear_over_dense"] = DENSE_RATIOS.get(length) if preset == PRESET else None
        if linear and base:
            row[f"over_{BASE_LEN}"] = _rate(linear) / _rate(base)
            row[f"target_over_{BASE_LEN}"] = MIN_SHARE if preset == PRESET and length == LONGEST else None
        rows.append(row)
    latest = curves["linear"][-1] if curves["linear"] else {}
    where = {name: latest.get(name) for name in ("date", "commit", "machine", "cores", "gemm_gflops_per_cpu_second")}
    return {"job": f"scaling {job}", "preset": preset, "batch": 1, "points": rows, "stopped": stops, **where}


def _rate(point: dict[str, Any]) -> float:
    return point["tokens_per_cpu_second"]


def plot(result: dict[str, Any]) -> str:
    """Plot both curves on logarithmic axes as SVG."""
    series: list[Series] = []
    for colour, kind in ((1, "linear"), (2, "dense")):
        points = [row[kind] for row in result["points"] if row[kind]]
        x, y = [p["sequence_len"] for p in points], [_rate(p) for p in points]
        series.append(Series(name=f"{kind} attention", x=x, y=y, colour=colour, kind="dots"))
    title = f"{result['preset']}: {result['job'].split()[-1]}, tokens per CPU-second by sequence length"
    chart = line_chart(
        series,
        label=title,
        x_label="sequence length",
        y_label="tokens / CPU-s",
        width=720,
        height=400,
        log_x=True,
        log_y=True,
    )
    return chart.standalone(title)


COLUMNS = (
    "tokens",
    "linear /CPU-s",
    "dense /CPU-s",
    "linear over dense",
    f"linear over T={BASE_LEN:,}",
    "linear /s",
    "dense /s",
    "linear GB",
    "dense GB",
)


def scaling_table(result: dict[str, Any]) -> ResultTable:
    notes = [f"{kind.capitalize()} attention: {reason}." for kind, reason in result["stopped"].items()]
    return ResultTable(result, COLUMNS, [_cells(row) for row in result["points"]], notes)


def _cells(row: dict[str, Any]) -> list[str]:
    def figure(kind: str, name: str, unit: float = 1, form: str = ",.0f") -> str:
        return format(row[kind][name] / unit, form) if row[kind] else "-"

    def ratio(name: str) -> str:
        target = row.get(f"target_{name}")
        return f"{row[name]:.2f}x" + (f" (target {target:g})" if target else "") if name in row else "-"

    return [
        f"{row['sequence_len']:,}",
        figure("linear", "tokens_per_cpu_second"),
        figure("dense", "tokens_per_cpu_second"),
        ratio("linear_over_dense"),
        ratio(f"over_{BASE_LEN}"),
        figure("linear", "tokens_per_second"),
        figure("dense", "tokens_per_second"),
        figure("linear", "peak_rss_bytes", 1e9, ".2f"),
        figure("dense", "peak_rss_bytes", 1e9, ".2f"),
    ]


@dataclasses.dataclass(frozen=True)
class Flags(Output):
    preset: str = PRESET
    """Preset of the family vq."""
    max_sequence_len: int = LONGEST
    """Longest sequence in tokens."""
    forward_only: bool = False
    """Measure evaluation instead of training."""
    out: Path = Path("scaling.svg")
    """Output file of the plot."""
    seconds: float = 5.0
    """Minimum time in seconds to repeat each measurement."""


def main(flags: Flags) -> tuple[dict[str, Any], ResultTable]:
    job, lengths = "eval" if flags.forward_only else "train", lengths_up_to(flags.max_sequence_len)
    result = run_scaling(flags.preset, lengths, job=job, seconds=flags.seconds, out=flags.out, log=log)
    log(f"The plot is in {flags.out}.")
    return result, scaling_table(result)


if __name__ == "__main__":
    run_command(Flags, "scaling", main)
