"""The report's section on codebooks: code usage per unit, over time and at the latest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from linnet.report import plots
from linnet.report.charts import columns, heat_map
from linnet.report.page import card, half, none, section, table, two_widths
from linnet.report.plots import Record, per_part
from linnet.report.svg import compact

GROUP = "codebook"
NOTHING = section("Codebooks", none("No codebook diagnostics recorded."))
KINDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("entropy", "entropy (nats)", lambda v: f"{v:.3f}"),
    ("perplexity", "perplexity", lambda v: f"{v:.1f}"),
    ("usage", "used in a batch", lambda v: f"{100 * v:.0f}%"),
    ("dead", "dead codes", compact),
    ("relative_err", "relative error", lambda v: f"{v:.4f}"),
)


def section_of(records: Sequence[Record], config: dict[str, Any]) -> str:
    """Return the section, or an empty string if the run has no codebook diagnostics."""
    lines = plots.measured(records, GROUP)
    if not lines:
        return ""
    latest = lines[-1]
    heat = two_widths(lambda width, _: _usage(lines, width), 0)
    codes = plots.setting(config, "model", "n_code")
    figures: tuple[tuple[str, plots.Draw], ...] = (
        ("Codes in effective use over time", _spread(lines, "perplexity", "perplexity")),
        (f"Codes in effective use at step {latest['step']:,}", lambda w, h: _perplexity(latest, codes, w, h)),
        ("Entropy over time", _spread(lines, "entropy", "nats")),
        ("Quantisation error over time", _spread(lines, "relative_err", "relative error")),
    )
    drawn = ((title, half(draw)) for title, draw in figures)
    cards = "".join(card(title, chart) for title, chart in drawn if chart)
    return section(
        "Codebooks",
        card("Share of codes used, per unit over time", heat) if heat else "",
        f'<div class="pair" style="margin-top:16px">{cards}</div>' if cards else "",
        _units(latest),
        lead="Each unit names its keys by a code of its own codebook. Few codes in use, or many dead, is a collapse.",
    )


def _spread(lines: Sequence[Record], name: str, unit: str) -> plots.Draw:
    return lambda width, height: plots.spread_figure(lines, GROUP, name, unit, width, height)


def _usage(lines: Sequence[Record], width: float) -> str | None:
    """Draw the fraction of codes in use, with one row per unit and one column per step."""
    lines = [r for r in lines if per_part(r, GROUP, "usage")]
    if not lines:
        return None
    units = max(len(per_part(r, GROUP, "usage")) for r in lines)
    chosen = plots.moments(lines, units, width)
    cells = [[(per_part(r, GROUP, "usage") + [None] * units)[u] for r in chosen] for u in range(units)]
    return heat_map(
        cells,
        [float(r["step"]) for r in chosen],
        label="Share of codes used in a batch, per unit, over steps",
        x_label="step",
        y_label="unit",
        low=0.0,
        high=1.0,
        width=width,
        y_text=lambda v: f"{100 * v:.0f}%",
    )


def _perplexity(record: Record, n_code: float | None, width: float, height: float) -> str | None:
    """Draw the effective number of codes (perplexity) of each unit, against the codebook size."""
    values = [0.0 if v is None else max(v, 0.0) for v in per_part(record, GROUP, "perplexity")]
    if not values:
        return None
    return columns(
        [str(u) for u in range(len(values))],
        values,
        label="Perplexity of code use per unit",
        x_label="unit",
        y_label="perplexity",
        ceiling=("all codes:", n_code) if n_code is not None and n_code > 0 else None,
        width=width,
        height=height,
    )


def _units(record: Record) -> str:
    head, body = plots.part_table(record, GROUP, "unit", KINDS)
    if not body:
        return ""
    grid = table(head, [[escape(cell) for cell in row] for row in body], range(1, len(head)))
    return f'<div class="card" style="margin-top:16px"><h3>Every unit at step {record["step"]:,}</h3>{grid}</div>'
