"""Loss by position in the sequence, which shows whether longer context helps: for the report and `linnet eval`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linnet.evaluate.positions import SIGNIFICANT, compared_bins
from linnet.report.charts import Series, line_chart
from linnet.report.figures import decimals
from linnet.report.metrics import finite
from linnet.report.page import Figure, figure
from linnet.report.svg import Chart

if TYPE_CHECKING:
    from rich.table import Table

BITS = 1.0 / math.log(2.0)


Bucket = tuple[int, int | None, float]
"""First position, end position (exclusive; None if unbounded), loss."""


def buckets(edges: Sequence[Any], losses: Sequence[Any]) -> list[Bucket]:
    """Return the buckets that have a finite loss."""
    return list(numbered_buckets(edges, losses).values())


def numbered_buckets(edges: Sequence[Any], losses: Sequence[Any]) -> dict[int, Bucket]:
    """Return the buckets that have a finite loss, by their index in the file."""
    valid: dict[int, Bucket] = {}
    for i, raw in enumerate(losses):
        start = finite(edges[i]) if i < len(edges) else None
        end = finite(edges[i + 1]) if i + 1 < len(edges) else None
        loss = finite(raw)
        if start is not None and start >= 0 and loss is not None:
            valid[i] = (int(start), None if end is None else int(end), loss)
    return valid


def describe_positions(by: Mapping[str, Any]) -> str:
    """Summarize `ByPosition.to_json()` in a sentence: whether the last positions have a lower loss than early ones.

    Gives a verdict only if there are standard errors, which evaluations by earlier versions lack.
    """
    shown = buckets(by["edges"], by["loss"])
    chosen = compared_bins([start for start, _, _ in shown], [loss for _, _, loss in shown])
    if chosen is None:
        return "Too few positions to determine whether longer context helps."
    early, last = (shown[i] for i in chosen)
    change = by.get("change")
    error = finite(change.get("standard_error")) if isinstance(change, Mapping) else None
    gain, margin = (early[2] - last[2]) * BITS, None if error is None else error * BITS
    amount = f"{abs(gain):.4f}" + ("" if margin is None else f" ± {margin:.4f}")
    compared = (
        f"The loss at positions {bucket_name(*last[:2])} is {amount} bits per token {'lower' if gain >= 0 else 'higher'} than at "
        f"positions {bucket_name(*early[:2])}"
    )
    if margin is None or not isinstance(change, Mapping):
        return f"{compared}; the standard error is not known, so this may not be significant."
    over = f"(± one standard error over {finite(change.get('sequences')) or 0:,.0f} sequences)"
    if abs(gain) <= SIGNIFICANT * margin:
        return f"{compared} {over}: not significant, so this does not show that longer context helps or harms."
    verdict = "helps" if gain > 0 else "does not help"
    best = min(shown, key=lambda bucket: bucket[2])
    lowest = "" if best is last else f" The lowest loss is at positions {bucket_name(*best[:2])}."
    return f"{compared} {over}: longer context {verdict}.{lowest}"


def position_table(by: Mapping[str, Any]) -> Table:
    """Return a table of the loss per bucket of positions, for the terminal."""
    from rich.table import Table

    table = Table(title="Loss by position")
    table.add_column("positions", justify="right")
    table.add_column("nats per token", justify="right")
    table.add_column("bits per token", justify="right")
    table.add_column("standard error", justify="right")
    table.add_column("")
    errors = by.get("standard_error") or []
    shown = numbered_buckets(by["edges"], by["loss"])
    highest = max((loss for _, _, loss in shown.values()), default=0.0)
    for i, (start, end, loss) in shown.items():
        bar = "█" * round(24 * loss / highest) if highest > 0 else ""
        error = finite(errors[i]) if i < len(errors) else None
        margin = "" if error is None else f"± {error * BITS:.4f}"
        table.add_row(bucket_name(start, end), f"{loss:.4f}", f"{loss * BITS:.4f}", margin, bar)
    return table


def bucket_name(start: int, end: int | None) -> str:
    if end is None:
        return f"{start:,}+"
    return f"{start:,}" if end - start <= 1 else f"{start:,}–{end - 1:,}"


def position_figure(split: str, evaluation: Mapping[str, Any]) -> Figure | None:
    """Return the figure of an evaluation, or None if its file has no losses by position."""
    by = evaluation.get("per_position")
    if not isinstance(by, dict) or not isinstance(by.get("edges"), list) or not isinstance(by.get("loss"), list):
        return None
    if not buckets(by["edges"], by["loss"]):
        return None
    # In an image, position also determines content, so it does not isolate the effect of context.
    text = "" if "bits_per_dim" in evaluation else describe_positions(by)
    draw = functools.partial(position_chart, by["edges"], by["loss"])
    return figure(f"Loss by position, {split}", draw, height=300, text=text)


def position_chart(edges: Sequence[Any], losses: Sequence[Any], *, width: float, height: float) -> Chart:
    """Draw the loss over the position in the sequence, counted from 1; the axis is logarithmic for wide ranges."""
    shown = buckets(edges, losses)
    assert shown, "no bucket has a finite loss"
    middles = [math.sqrt((a + 1) * max(b if b is not None else a + 1, a + 1)) for a, b, _ in shown]
    series = Series(name="loss", x=middles, y=[loss * BITS for _, _, loss in shown], kind="dots")
    return line_chart(
        [series],
        label="Loss by position in the sequence",
        x_label="position",
        y_label="bits per token",
        log_x=middles[-1] / middles[0] >= 16,
        y_text=decimals,
        width=width,
        height=height,
    )


def position_svg(edges: Sequence[Any], losses: Sequence[Any]) -> str:
    """Return the position chart as a standalone SVG file."""
    return position_chart(edges, losses, width=640, height=340).standalone("Loss by position in the sequence")
