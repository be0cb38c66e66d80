"""Text reports of plans: one mesh in detail, or several in a table."""

from __future__ import annotations

from collections.abc import Sequence

from linnet.plan import roofline
from linnet.plan.chips import Chip
from linnet.plan.outcome import Memory, Plan
from linnet.plan.sizes import in_words, seconds_in_words

KINDS = {
    "parameters": "parameters",
    "optimizer": "optimiser",
    "average": "moving average",
    "codebooks": "codebooks",
    "carry": "carried state",
    "batch": "batch",
    "temporary": "gradients, activations and other temporaries",
    "results": "results",
}
HEADER = ("mesh", "state", "temporaries", "in all", "TFLOPs", "sent", "compute", "memory", "communication", "fits")


def by_kind(memory: Memory) -> list[tuple[str, int]]:
    """Return the nonzero kinds of memory with their labels."""
    return [(words, getattr(memory, name)) for name, words in KINDS.items() if getattr(memory, name)]


def format_report(plan: Plan, chip: Chip, hbm: float) -> str:
    lines = [f"Mesh {plan.mesh or 'of one device'}: {plan.n_device:,} devices, {plan.rows:,} rows an update.", ""]
    lines.append("Bytes on each device:")
    pairs = [*by_kind(plan.memory), ("in all", plan.memory.total)]
    width = max(len(words) for words, _ in pairs)
    lines += [f"  {words:{width}}  {in_words(n):>9}" for words, n in pairs]
    lines += ["", f"{_verdict(plan, hbm)}", "", *_work(plan), *_times(plan, chip), *remarks(plan)]
    return "\n".join(lines)


def _verdict(plan: Plan, hbm: float) -> str:
    if plan.memory.total <= hbm:
        return f"It fits in {in_words(hbm)}, with {in_words(hbm - plan.memory.total)} to spare."
    return f"It does not fit in {in_words(hbm)}: {in_words(plan.memory.total - hbm)} too much."


def _work(plan: Plan) -> list[str]:
    done, needed = plan.program.flops * plan.n_device, plan.useful_flops
    kinds = ", ".join(f"{kind} {in_words(n)}" for kind, n in sorted(plan.program.sent_by_kind().items()))
    return [
        f"FLOPs an update: {done:.4g} in all, {plan.program.flops:.4g} a device; {needed:.4g} ({needed / done:.0%}) are the model's "
        "own, the rest is computed again, or by several devices at once.",
        f"Sent by a device in an update: {in_words(plan.program.sent())}" + (f" ({kinds})." if kinds else "."),
    ]


def _times(plan: Plan, chip: Chip) -> list[str]:
    times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
    share = roofline.share_of_peak(plan.useful_flops, plan.n_device, times.step, chip, plan.dtype)
    return [
        f"At best on {chip.name}: compute {seconds_in_words(times.compute)}, memory {seconds_in_words(times.memory)}, communication "
        f"{seconds_in_words(times.communication)}. Bound by {times.bound}: {share:.0%} of the chips' peak."
    ]


def remarks(plan: Plan) -> list[str]:
    """Return notes on the assumptions behind the figures."""
    lines: list[str] = []
    if plan.dtype == "bfloat16":
        lines.append(
            "Temporaries are an upper bound: the program was compiled for this machine, which computes bfloat16 in float32."
        )
    if plan.assumed_turns is not None:
        lines.append(f"Experts are taken to be chosen equally often: {plan.assumed_turns:g} blocks of tokens for each.")
    if plan.compiled_mesh is not None:
        lines.append(
            f"Compiled for {plan.compiled_mesh} with as many rows a device; collectives along data are drawn out from there."
        )
    return lines


def row(plan: Plan, chip: Chip, hbm: float) -> tuple[str, ...]:
    times = roofline.times(plan.program, plan.memory.state, chip, plan.dtype)
    return (
        plan.mesh or "one device",
        in_words(plan.memory.state),
        in_words(plan.memory.temporary),
        in_words(plan.memory.total),
        f"{plan.program.flops / 1e12:,.4g}",
        in_words(plan.program.sent()),
        *(seconds_in_words(t) for t in (times.compute, times.memory, times.communication)),
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
