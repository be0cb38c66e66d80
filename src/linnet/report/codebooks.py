"""The report's section on codebooks: code usage per unit, over time and at the latest step."""

from __future__ import annotations

import functools

from linnet.report.charts import column_chart
from linnet.report.figures import Diagnostic, heat_map_over_steps, part_table, spread_figure
from linnet.report.metrics import Record, RunData, per_part, records_with
from linnet.report.page import Figure, Notice, Section, columns, figure, half_figure, section
from linnet.report.svg import compact

GROUP = "codebook"
NOTHING = section("Codebooks", Notice("No codebook diagnostics recorded."))
DIAGNOSTICS: tuple[Diagnostic, ...] = (
    ("entropy", "entropy (nats)", lambda v: f"{v:.3f}"),
    ("perplexity", "perplexity", lambda v: f"{v:.1f}"),
    ("usage", "used in a batch", lambda v: f"{100 * v:.0f}%"),
    ("dead", "dead codes", compact),
    ("relative_err", "relative error", lambda v: f"{v:.4f}"),
)


def codebook_section(run: RunData) -> Section | None:
    """Return the section, or None if the run has no codebook diagnostics."""
    records = records_with(run.records, GROUP)
    if not records:
        return None
    latest = records[-1]
    return section(
        "Codebooks",
        _usage(records),
        columns([
            spread_figure("Codebook perplexity over time", records, GROUP, "perplexity", "perplexity"),
            _perplexity(latest, run.setting("model", "n_code")),
            spread_figure("Entropy over time", records, GROUP, "entropy", "nats"),
            spread_figure("Quantization error over time", records, GROUP, "relative_err", "relative error"),
        ]),
        part_table(latest, GROUP, "unit", DIAGNOSTICS),
        lead="Each unit quantizes its keys with its own codebook. If few codes are used or many are dead, the codebook has "
        "collapsed. Perplexity is the effective number of codes. Curves show the minimum, mean and maximum over units.",
    )  # fmt: skip


def _usage(records: list[Record]) -> Figure | None:
    """Draw the fraction of codes in use, with one row per unit and one column per step."""
    rows = [(float(r["step"]), usage) for r in records if (usage := per_part(r, GROUP, "usage"))]
    if not rows:
        return None
    label = "Fraction of codes used in a batch, per unit, over steps"
    draw = heat_map_over_steps(rows, label=label, y_label="unit", high=1.0, y_text=lambda v: f"{100 * v:.0f}%")
    return figure("Codes used in a batch, per unit", draw)


def _perplexity(record: Record, n_code: float | None) -> Figure | None:
    """Draw the effective number of codes (perplexity) of each unit, against the codebook size."""
    values = [0.0 if v is None else max(v, 0.0) for v in per_part(record, GROUP, "perplexity")]
    if not values:
        return None
    ceiling = ("codebook size", n_code) if n_code is not None and n_code > 0 else None
    draw = functools.partial(
        column_chart, [str(u) for u in range(len(values))], values, label="Perplexity of code use per unit", x_label="unit",
        y_label="perplexity", ceiling=ceiling,
    )  # fmt: skip
    return half_figure(f"Codebook perplexity at step {record['step']:,}", draw)
