"""The report's section on experts: load per layer over time, and confidence of the routers."""

from __future__ import annotations

from collections.abc import Sequence

from linnet.report.figures import Diagnostic, heat_map_over_steps, part_table, scalar_figure, spread_figure
from linnet.report.metrics import MAX_PARTS, Record, RunData, finite, per_part, records_with
from linnet.report.page import Figure, Notice, Section, columns, half_figure, section

GROUP = "experts"
MAX_LAYERS, MAX_EXPERTS = 8, 64  # drawn, to limit the page size; the table has every layer
NOTHING = section("Experts", Notice("No expert diagnostics recorded."))


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


DIAGNOSTICS: tuple[Diagnostic, ...] = (
    ("balance", "experts in effective use", lambda v: f"{100 * v:.0f}%"),
    ("idlest", "load of the least used", _percent),
    ("busiest", "load of the most used", _percent),
    ("confidence", "probability of the selected", _percent),
)


def expert_section(run: RunData) -> Section | None:
    """Return the section, or None if the run has no expert diagnostics."""
    records = records_with(run.records, GROUP)
    if not records:
        return None
    latest = records[-1]
    layers = _layers_drawn(latest)
    return section(
        "Experts",
        columns(_load(records, layer) for layer in layers),
        columns([
            spread_figure("Experts in effective use", records, GROUP, "balance", "fraction of experts"),
            spread_figure("Load of the least used expert", records, GROUP, "idlest", "fraction of tokens' choices"),
            spread_figure("Load of the most used expert", records, GROUP, "busiest", "fraction of tokens' choices"),
            spread_figure("Total probability of the selected experts", records, GROUP, "confidence", "probability"),
            scalar_figure(run, ("Load-balancing loss", "loss_balance", 1.0, "1 = uniform load", 2, False)),
            scalar_figure(run, ("Router z-loss", "loss_router_z", 1.0, "squared logsumexp of logits", 2, False)),
        ]),
        part_table(latest, GROUP, "layer", DIAGNOSTICS),
        lead=_lead(run, len(layers), len(_loads(latest))),
    )  # fmt: skip


def _lead(run: RunData, n_drawn: int, n_layer: int) -> str:
    selected, n_expert = (run.setting("model", name) for name in ("n_choice", "n_expert"))
    lead = "In each layer a router sends every token to a few experts. An expert that is rarely selected hardly learns."
    if selected and n_expert:
        lead += (
            f" Here {selected:,.0f} of {n_expert:,.0f} are selected; a uniform load is {_percent(1 / n_expert)} each."
        )
    lead += " Curves show the minimum, mean and maximum over layers."
    return lead + (f" Heat maps show the {n_drawn} least balanced of {n_layer} layers." if n_drawn < n_layer else "")


def _loads(record: Record) -> list[list[float | None]]:
    """Return each expert's share of choices per layer; empty if the record is damaged."""
    layers = record[GROUP].get("load")
    if not isinstance(layers, list) or not all(isinstance(row, list) for row in layers):
        return []
    return [[finite(v) for v in row[:MAX_EXPERTS]] for row in layers[:MAX_PARTS]]


def _layers_drawn(record: Record) -> list[int]:
    """Return the layers to draw: all, or the least balanced ones if there are more than `MAX_LAYERS`."""
    n_layer, balance = len(_loads(record)), per_part(record, GROUP, "balance")

    def evenness(layer: int) -> float:
        value = balance[layer] if layer < len(balance) else None
        return 1.0 if value is None else value

    return sorted(sorted(range(n_layer), key=evenness)[:MAX_LAYERS])


def _load(records: Sequence[Record], layer: int) -> Figure | None:
    """Draw a layer's load with one row per expert and one column per step.

    The strongest colour means twice a uniform load or more, in every layer.
    """
    rows = [(float(r["step"]), loads[layer]) for r in records if len(loads := _loads(r)) > layer]
    n_expert = max((len(row) for _, row in rows), default=0)
    if not n_expert:
        return None
    label = f"Load of each expert of layer {layer}, over steps"
    draw = heat_map_over_steps(rows, label=label, y_label="expert", high=2.0 / n_expert, y_text=_percent, cost=4)
    return half_figure(f"Layer {layer}: load per expert", draw, height=None)
