"""Tables of benchmark results for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from linnet.bench.targets import CORES_SPEEDUP, REFERENCE_GEMM

if TYPE_CHECKING:
    from rich.table import Table

SCALED = f"Targets are scaled by the measured matmul rate over {REFERENCE_GEMM:g} GFLOP per CPU-second."


@dataclasses.dataclass(frozen=True)
class ResultTable:
    result: dict[str, Any]
    """What was measured, when and on which machine, for the heading."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def to_rich(table: ResultTable) -> Table:
    from rich.table import Table

    title, caption = (
        f"{table.result['job']} {table.result['preset']}",
        "\n".join([_heading(table.result), *table.notes]),
    )
    shown = Table(title=title, title_justify="left", caption=caption)
    for i, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if i and name != "details" else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def to_markdown(table: ResultTable) -> str:
    lines = [table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows]
    grid = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n\n".join([_heading(table.result), grid, *([" ".join(table.notes)] if table.notes else [])]) + "\n"


def throughput_table(results: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> ResultTable:
    """Return a table with one row per result. All results are of one machine and commit."""
    columns = (
        "job", "tokens / CPU-s", "target, scaled", "tokens / s", "compile CPU-s", "peak GB", "MFU", "GEMM GFLOP / CPU-s", "reached",
    )  # fmt: skip
    rows = [
        [
            f"{r['job']}{_weights(r)}, T {r['sequence_len']:,}, batch {r['batch']}, {_cores(r['cores'])}",
            f"{r['tokens_per_cpu_second']:,.0f}",
            f"{r['target']:,.0f}, {r['target_scaled']:,.0f}" if "target" in r else "-",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['compile_cpu_seconds']:.1f}",
            f"{r['peak_rss_bytes'] / 1e9:.2f}",
            f"{r['mfu']:.0%}",
            f"{r['gemm_gflops_per_cpu_second']:.1f}",
            ("yes" if r["reached"] else "no") if "reached" in r else "-",
        ]
        for r in results
    ]
    speedups = [
        f"{r['job']}, T {r['sequence_len']:,}, batch {r['batch']}: {_cores(r['cores'])} are "
        f"{r['speedup_over_one_core']:.2f} times as fast as one (target: {CORES_SPEEDUP})."
        for r in results
        if "speedup_over_one_core" in r
    ]
    return ResultTable(results[0], columns, rows, [SCALED, *speedups, *notes])


def metrics_table(result: dict[str, Any]) -> Table:
    """Return one result for the terminal, with one row per metric."""
    from rich.table import Table

    table = Table(title=f"{result['job']} {result['preset']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _lines(result):
        table.add_row(name, value)
    return table


def _lines(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    length = "context" if result["job"] == "decode" else "sequence length"
    yield "shape", f"{length} {result['sequence_len']:,}, batch {result['batch']}, {_cores(result['cores'])}"
    yield "tokens / CPU-second", f"{result['tokens_per_cpu_second']:,.0f}{_against_target(result)}"
    yield "tokens / second", f"{result['tokens_per_second']:,.0f}"
    if "time_to_first_token" in result:
        yield "time to first token", f"{result['time_to_first_token'] * 1e3:,.1f} ms"
    if "speedup_over_one_core" in result:
        target = f"target for training on two cores: at least {CORES_SPEEDUP}x"
        yield "speed-up over one core", f"{result['speedup_over_one_core']:.2f}x ({target})"
    limits = result.get("limits", {})
    compile_time = f"{result['compile_cpu_seconds']:.1f} CPU-seconds, {result['compile_seconds']:.1f} seconds"
    yield "compile", compile_time + _against_limit(limits.get("compile_cpu_seconds"), 1, "CPU-seconds")
    peak = f"{result['peak_rss_bytes'] / 1e9:.2f} GB"
    yield "peak memory", peak + _against_limit(limits.get("peak_rss_bytes"), 1e9, "GB")
    if "state_bytes" in result:
        yield "state", f"{result['state_bytes'] / 1e6:,.2f} MB per sequence, independent of its length"
    yield "work", f"{result['flops_per_token'] / 1e6:,.1f} MFLOP per token"
    gemm = f"{result['gemm_gflops_per_cpu_second']:.1f} GFLOP / CPU-second, {result['gemm_gflops_per_second']:.1f} GFLOP / second"
    yield "reference matmul", gemm
    yield "MFU", f"{result['mfu']:.1%} of the reference matmul"
    yield "repetitions", f"{result['repetitions']}, spread {result['spread']:.0%}"
    yield "measured", f"{result['date']}, {_machine(result)}"


def _against_target(result: dict[str, Any]) -> str:
    if "target" not in result:
        return ""
    verdict = "reached" if result["target_ratio"] >= 1 else "not reached"
    return f" (target {result['target']:,.0f}, here {result['target_scaled']:,.0f}: {verdict}, {result['target_ratio']:.2f}x)"


def _against_limit(limit: dict[str, Any] | None, unit: float, name: str) -> str:
    if limit is None:
        return ""
    return f" (limit {limit['limit'] / unit:g} {name}: {'met' if limit['reached'] else 'exceeded'})"


def _heading(result: dict[str, Any]) -> str:
    return f"`{result['preset']}`, measured {result['date']}, {_machine(result)}."


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"] or {}
    commit, changes = (result["commit"] or "no checkout").partition("+")[::2]
    memory = machine.get("memory_bytes")
    parts = [
        f"commit {commit[:12]}{' with changes' if changes else ''}",
        machine.get("cpu") or "unknown processor",
        f"{_cores(machine.get('cores_usable'))} usable",
        f"{memory / 2**30:.0f} GiB" if memory else "",
        f"jax {machine.get('versions', {}).get('jax')}",
    ]
    return ", ".join(part for part in parts if part)


def _weights(result: dict[str, Any]) -> str:
    """Return the weight dtype, if it is part of the result."""
    return f", {result['weights']}" if "weights" in result else ""


def _cores(n: int | None) -> str:
    return "1 core" if n == 1 else f"{n} cores"
