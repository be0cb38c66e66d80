"""Text of plans: one mesh in detail, or several in a table; sizes and durations, parsed and formatted."""

from __future__ import annotations

import re
from collections.abc import Sequence

from linnet.core.errors import invalid
from linnet.plan import roofline
from linnet.plan.chips import Chip
from linnet.plan.result import DeviceMemory, TrainingPlan

KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "average": "EMA",
    "codebooks": "codebooks",
    "carry": "state carried between updates",
    "batch": "batch",
    "temporary": "gradients, activations and other temporaries",
    "results": "results",
}
HEADER = ("mesh", "state", "temporaries", "total", "TFLOPs", "sent", "compute", "memory", "communication", "fits")


def by_kind(memory: DeviceMemory) -> list[tuple[str, int]]:
    """Return the nonzero kinds of memory with their labels."""
    return [(label, getattr(memory, name)) for name, label in KINDS.items() if getattr(memory, name)]


def mesh_title(mesh: str) -> str:
    return f"mesh {mesh}" if mesh else "one device"


def format_report(plan: TrainingPlan, chip: Chip, hbm: float) -> str:
    lines = [f"{mesh_title(plan.mesh).capitalize()}: {plan.n_device:,} devices, {plan.rows:,} rows per update.", ""]
    lines.append("Memory per device:")
    pairs = [*by_kind(plan.memory), ("total", plan.memory.total)]
    width = max(len(label) for label, _ in pairs)
    lines += [f"  {label:{width}}  {format_bytes(n):>9}" for label, n in pairs]
    lines += ["", _verdict(plan, hbm), "", *_work(plan), *_times(plan, chip), *remarks(plan)]
    return "\n".join(lines)


def _verdict(plan: TrainingPlan, hbm: float) -> str:
    if plan.memory.total <= hbm:
        return f"It fits in {format_bytes(hbm)}, with {format_bytes(hbm - plan.memory.total)} to spare."
    return f"It does not fit in {format_bytes(hbm)}: {format_bytes(plan.memory.total - hbm)} too much."


def _work(plan: TrainingPlan) -> list[str]:
    done, needed = plan.program.flops * plan.n_device, plan.useful_flops
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in sorted(plan.program.sent_by_kind().items()))
    return [
        f"FLOPs per update: {done:.4g} in total, {plan.program.flops:.4g} per device; {needed:.4g} ({needed / done:.0%}) are model "
        "FLOPs, the rest is recomputed or computed by several devices.",
        f"Sent per device and update: {format_bytes(plan.program.sent())}" + (f" ({kinds})." if kinds else "."),
    ]


def _times(plan: TrainingPlan, chip: Chip) -> list[str]:
    times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
    share = roofline.share_of_peak(plan.useful_flops, plan.n_device, times.step, chip, plan.dtype)
    return [
        f"Lower bounds on {chip.name}: compute {format_seconds(times.compute)}, memory {format_seconds(times.memory)}, communication "
        f"{format_seconds(times.communication)}. Bound by {times.bound}; MFU at most {share:.0%}."
    ]


def remarks(plan: TrainingPlan) -> list[str]:
    """Return notes on the assumptions behind the figures."""
    lines: list[str] = []
    if plan.dtype == "bfloat16":
        lines.append(
            "Temporaries are an upper bound: the program was compiled for the CPU, which computes bfloat16 in float32."
        )
    if plan.assumed_turns is not None:
        lines.append(f"Assumes a uniform load of the experts: {plan.assumed_turns:g} blocks of tokens for each.")
    if plan.compiled_mesh is not None:
        lines.append(
            f"Compiled for {plan.compiled_mesh} with the same rows per device; collectives along data are extrapolated."
        )
    return lines


def row(plan: TrainingPlan, chip: Chip, hbm: float) -> tuple[str, ...]:
    times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
    return (
        plan.mesh or "one device",
        format_bytes(plan.memory.state),
        format_bytes(plan.memory.temporary),
        format_bytes(plan.memory.total),
        f"{plan.program.flops / 1e12:,.4g}",
        format_bytes(plan.program.sent()),
        *(format_seconds(t) for t in (times.compute, times.memory, times.communication)),
        "yes" if plan.memory.total <= hbm else "no",
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format aligned columns, one line per mesh. Lines are not wrapped to the terminal width."""
    widths = [max(len(cells[i]) for cells in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (header, *rows)
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


# Sizes and durations

_UNITS = {"": 1.0, "b": 1.0} | {f"{p}b": 1000.0**i for i, p in enumerate("kmgt", 1)}
_BINARY = {f"{p}ib": 1024.0**i for i, p in enumerate("kmgt", 1)}


def parse_size(text: str, field: str) -> float:
    """Parse a size such as `16GB`, `16GiB` or `80e9`."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-zA-Z]*)\s*", text)
    units = _UNITS | _BINARY
    if not match or match[2].lower() not in units:
        raise invalid(field, text, "a size in bytes", "write it as 16GB or 80GiB")
    try:
        value = float(match[1]) * units[match[2].lower()]
    except ValueError:
        raise invalid(field, text, "a size in bytes", "write it as 16GB or 80GiB") from None
    if not value > 0:
        raise invalid(field, text, "above 0", "write it as 16GB")
    return value


def format_bytes(n_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.3g} {unit}" if n_bytes < 999.5 * scale else f"{n_bytes / scale:,.0f} {unit}"
    return f"{n_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:,.3g} {unit}" if seconds < 999.5 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"
