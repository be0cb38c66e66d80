"""Tables of benchmark results for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from linnet.bench import prior, serve
from linnet.bench.scaling import BASE_LEN
from linnet.bench.targets import CORES_SPEEDUP, REFERENCE_GEMM

if TYPE_CHECKING:
    from rich.table import Table


def render(result: dict[str, Any]) -> Table:
    """Make a table of one result, with one row per metric."""
    from rich.table import Table

    table = Table(title=f"{result['job']} {result['preset']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, words in _lines(result):
        table.add_row(name, words)
    return table


def render_scaling(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"{result['job']} {result['preset']}, batch 1", title_justify="left")
    for name in _SCALING_COLUMNS:
        table.add_column(name, justify="right")
    for row in result["points"]:
        table.add_row(*_scaling_cells(row))
    notes = [f"{kind} attention: {why}" for kind, why in result["stopped"].items()]
    table.caption = "\n".join(notes) or None
    return table


def _lines(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    length = "context" if result["job"] == "decode" else "sequence length"
    yield "shape", f"{length} {result['sequence_len']:,}, batch {result['batch']}, {_cores(result['cores'])}"
    yield "tokens / CPU-second", f"{result['tokens_per_cpu_second']:,.0f}{_against_target(result)}"
    yield "tokens / second", f"{result['tokens_per_second']:,.0f}"
    if "time_to_first_token" in result:
        yield "time to first token", f"{result['time_to_first_token'] * 1e3:,.1f} ms"
    if "speedup_over_one_core" in result:
        yield (
            "speed-up over one core",
            f"{result['speedup_over_one_core']:.2f}x (at least {CORES_SPEEDUP}x wanted of two in training)",
        )
    limits = result.get("limits", {})
    compile_words = f"{result['compile_cpu_seconds']:.1f} CPU-seconds, {result['compile_seconds']:.1f} seconds"
    yield "compile", compile_words + _against_limit(limits.get("compile_cpu_seconds"), 1, "CPU-seconds")
    peak = f"{result['peak_rss_bytes'] / 1e9:.2f} GB"
    yield "peak memory", peak + _against_limit(limits.get("peak_rss_bytes"), 1e9, "GB")
    if "state_bytes" in result:
        yield "state", f"{result['state_bytes'] / 1e6:,.2f} MB a sequence, however long it is"
    yield "work", f"{result['flops_per_token'] / 1e6:,.1f} MFLOP a token"
    yield (
        "matrix product",
        f"{result['gemm_gflops_per_cpu_second']:.1f} GFLOP / CPU-second, {result['gemm_gflops_per_second']:.1f} GFLOP / second",
    )
    yield "MFU", f"{result['mfu']:.1%} of that matrix product"
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
    return f" (limit {limit['limit'] / unit:g} {name}: {'kept' if limit['reached'] else 'not kept'})"


_SCALING_COLUMNS = (
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


def _scaling_cells(row: dict[str, Any]) -> list[str]:
    def figure(kind: str, name: str, unit: float = 1, form: str = ",.0f") -> str:
        return format(row[kind][name] / unit, form) if row[kind] else "-"

    def ratio(name: str) -> str:
        wanted = row.get(f"target_{name}")
        return f"{row[name]:.2f}x" + (f" (target {wanted:g})" if wanted else "") if name in row else "-"

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


_SCALED = f"Targets are scaled by the measured matrix product over {REFERENCE_GEMM:g} GFLOP a CPU-second."


def markdown(results: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> str:
    """Format the results of one machine and commit as a Markdown table for docs/benchmarks.md."""
    columns = (
        "job", "tokens / CPU-s", "target, scaled", "tokens / s", "compile CPU-s", "peak GB", "MFU", "GEMM GFLOP / CPU-s", "reached",
    )  # fmt: skip
    rows = [
        [
            f"{r['job']}{_held(r)}, T {r['sequence_len']:,}, batch {r['batch']}, {_cores(r['cores'])}",
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
        f"{r['speedup_over_one_core']:.2f} times as fast as one (wanted: {CORES_SPEEDUP})."
        for r in results
        if "speedup_over_one_core" in r
    ]
    return "\n\n".join([_heading(results[0]), _grid(columns, rows), " ".join([_SCALED, *speedups, *notes])]) + "\n"


def markdown_scaling(result: dict[str, Any]) -> str:
    notes = [f"{kind.capitalize()} attention: {why}." for kind, why in result["stopped"].items()]
    parts = [_heading(result), _grid(_SCALING_COLUMNS, [_scaling_cells(row) for row in result["points"]])]
    return "\n\n".join([*parts, *([" ".join(notes)] if notes else [])]) + "\n"


def render_serve(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=f"serve {result['preset']}", title_justify="left", caption=_heading(result))
    for name in serve.COLUMNS:
        table.add_column(name)
    for row in result["rows"]:
        table.add_row(*serve.cells(row))
    return table


def markdown_serve(result: dict[str, Any]) -> str:
    rows = [serve.cells(row) for row in result["rows"]]
    gemm = ", ".join(f"{value:.1f} ({job.removeprefix('serve-')})" for job, value in result["gemm"].items())
    note = f"The matrix product of each job's process, GFLOP / CPU-s: {gemm}."
    return "\n\n".join([_heading(result), _grid(serve.COLUMNS, rows), note]) + "\n"


def render_prior(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(
        title=result["preset"], title_justify="left", caption="\n".join([_heading(result), *prior.notes(result)])
    )
    for name in prior.COLUMNS:
        table.add_column(name, justify="left" if name == "job" else "right")
    for row in result["rows"]:
        table.add_row(*prior.cells(row))
    return table


def markdown_prior(result: dict[str, Any]) -> str:
    rows = [prior.cells(row) for row in result["rows"]]
    words = " ".join([_SCALED, *prior.notes(result)])
    return "\n\n".join([_heading(result), _grid(prior.COLUMNS, rows), words]) + "\n"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _heading(result: dict[str, Any]) -> str:
    return f"`{result['preset']}`, measured {result['date']}, {_machine(result)}."


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"] or {}
    commit, changes = (result["commit"] or "no checkout").partition("+")[::2]
    memory = machine.get("memory_bytes")
    words = [
        f"commit {commit[:12]}{' with changes' if changes else ''}",
        machine.get("cpu") or "unknown processor",
        f"{_cores(machine.get('cores_usable'))} usable",
        f"{memory / 2**30:.0f} GiB" if memory else "",
        f"jax {machine.get('versions', {}).get('jax')}",
    ]
    return ", ".join(word for word in words if word)


def _held(result: dict[str, Any]) -> str:
    """Return the weight dtype, if it is part of the result."""
    return f", {result['weights']}" if "weights" in result else ""


def _cores(n: int | None) -> str:
    return "1 core" if n == 1 else f"{n} cores"
