"""The report's section on experts: load per layer over time, and confidence of the routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from linnet.report import plots
from linnet.report.charts import heat_map
from linnet.report.page import card, half, none, section, table
from linnet.report.plots import Record, finite, per_part

GROUP = "experts"
MAX_LAYERS, MAX_EXPERTS = 8, 64  # drawn, to limit the page size; the table has every layer
NOTHING = section("Experts", none("No expert diagnostics recorded."))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


KINDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("balance", "experts in effective use", lambda v: f"{100 * v:.0f}%"),
    ("idlest", "choices of the idlest", _percent),
    ("busiest", "choices of the busiest", _percent),
    ("confidence", "probability of the chosen", _percent),
)


def section_of(records: Sequence[Record], config: dict[str, Any]) -> str:
    """Return the section, or an empty string if the run has no expert diagnostics."""
    lines = plots.measured(records, GROUP)
    if not lines:
        return ""
    latest = lines[-1]
    figures: list[tuple[str, plots.Draw]] = [
        ("Experts in effective use, of all", _spread(lines, "balance", "share of experts")),
        ("Choices of the idlest expert", _spread(lines, "idlest", "share of choices")),
        ("Choices of the busiest expert", _spread(lines, "busiest", "share of choices")),
        ("Probability of the chosen, added up", _spread(lines, "confidence", "probability")),
    ]
    for title, name, unit in (
        ("Balance loss", "loss_balance", "1 where all are used alike"),
        ("Router-z loss", "loss_router_z", "squared log-sum of logits"),
    ):
        x, y = plots.curve(records, "train", name)
        if x:
            figures.append((title, plots.scalar_figure(title, x, y, unit, 2, False)))
    layers = _layers_drawn(latest)
    maps = [(f"Layer {i}: each expert's share of choices", _load(lines, i)) for i in layers]
    return section(
        "Experts",
        _cards(maps),
        _cards(figures),
        _every_layer(latest),
        lead=_lead(config, len(layers), len(_loads(latest))),
    )


def _lead(config: dict[str, Any], n_drawn: int, n_layer: int) -> str:
    chosen, all_ = (plots.setting(config, "model", name) for name in ("n_choice", "n_expert"))
    words = "In every layer a router sends each token to a few experts. One that is hardly ever chosen learns nothing."
    if chosen and all_:
        words += f" Here {chosen:,.0f} of {all_:,.0f} are chosen; an even share of choices is {_percent(1 / all_)}."
    words += " Curves are the least, the mean and the greatest of the layers."
    return words + (f" The {n_drawn} least even layers of {n_layer} are drawn." if n_drawn < n_layer else "")


def _cards(figures: Sequence[tuple[str, plots.Draw]]) -> str:
    drawn = ((title, half(draw)) for title, draw in figures)
    cards = "".join(card(title, chart) for title, chart in drawn if chart)
    return f'<div class="pair" style="margin-top:16px">{cards}</div>' if cards else ""


def _spread(lines: Sequence[Record], name: str, unit: str) -> plots.Draw:
    return lambda width, height: plots.spread_figure(lines, GROUP, name, unit, width, height)


def _loads(record: Record) -> list[list[float | None]]:
    """Return each expert's share of choices per layer; empty if the record is damaged."""
    layers = record[GROUP].get("load")
    if not isinstance(layers, list) or not all(isinstance(row, list) for row in layers):
        return []
    return [[finite(v) for v in row[:MAX_EXPERTS]] for row in layers[: plots.MAX_PARTS]]


def _layers_drawn(record: Record) -> list[int]:
    """Return the layers to draw: all, or the least balanced ones if there are more than `MAX_LAYERS`."""
    n_layer, balance = len(_loads(record)), per_part(record, GROUP, "balance")

    def evenness(layer: int) -> float:
        value = balance[layer] if layer < len(balance) else None
        return 1.0 if value is None else value

    return sorted(sorted(range(n_layer), key=evenness)[:MAX_LAYERS])


def _load(lines: Sequence[Record], layer: int) -> plots.Draw:
    """Draw a layer's load with one row per expert and one column per step.

    The strongest colour means twice an even share or more, in every layer.
    """

    def draw(width: float, _: float) -> str | None:
        rows = [(float(r["step"]), loads[layer]) for r in lines if len(loads := _loads(r)) > layer]
        n_expert = max((len(row) for _, row in rows), default=0)
        if not n_expert:
            return None
        chosen = plots.moments([{"step": step, "row": row} for step, row in rows], 4 * n_expert, width)
        return heat_map(
            [[(r["row"] + [None] * n_expert)[e] for r in chosen] for e in range(n_expert)],
            [r["step"] for r in chosen],
            label=f"Share of choices of each expert of layer {layer}, over steps",
            x_label="step",
            y_label="expert",
            low=0.0,
            high=2.0 / n_expert,
            width=width,
            y_text=_percent,
        )

    return draw


def _every_layer(record: Record) -> str:
    head, body = plots.part_table(record, GROUP, "layer", KINDS)
    if not body:
        return ""
    grid = table(head, [[escape(cell) for cell in row] for row in body], range(1, len(head)))
    return f'<div class="card" style="margin-top:16px"><h3>Every layer at step {record["step"]:,}</h3>{grid}</div>'
