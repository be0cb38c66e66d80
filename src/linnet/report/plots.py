"""Charts of a run's metrics, for the report and `linnet eval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.evaluate.positions import SIGNIFICANT, compared_bins
from linnet.report.charts import Series, line_chart, rows
from linnet.report.svg import compact, standalone

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, Any]

BITS = 1.0 / math.log(2.0)
MAX_PARTS = 512
LARGEST, LEAST = 1e15, 1e-30  # plotted range: larger values come from damaged files, smaller ones become 0


def finite(value: Any) -> float | None:
    """Return an untrusted value as a number that can be plotted, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value) if abs(value) > LEAST else 0.0


def setting(config: dict[str, Any], *names: str) -> float | None:
    """Return a numeric setting of a run's config, or None."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return finite(value)


def curve(records: Sequence[Record], kind: str, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Return steps and values of one metric, ordered by step, without missing values."""
    found = ((finite(r.get("step")), finite(r.get(name))) for r in records if r.get("kind") == kind)
    pairs = sorted(((s, v * scale) for s, v in found if s is not None and v is not None), key=lambda pair: pair[0])
    return [s for s, _ in pairs], [v for _, v in pairs]


def smooth(values: Sequence[float], half: int) -> list[float]:
    """Return the moving average over `half` neighbours on each side; the window shrinks symmetrically at the ends."""
    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    reach = [min(half, i, n - 1 - i) for i in range(n)]
    return [float(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else compact(value)


def loss_figure(
    records: Sequence[Record], levels: Sequence[tuple[str, float]], width: float, height: float
) -> str | None:
    """Draw training and validation loss over steps, in bits per byte if available, else in nats per token."""
    bits = any(finite(r.get("bits_per_byte")) is not None for r in records)
    name, unit = ("bits_per_byte", "bits per byte") if bits else ("loss", "nats per token")
    x, y = curve(records, "train", name)
    ex, ey = curve(records, "eval", name)
    if not x and not ex:
        return None
    series: list[Series] = []
    if x:
        smoothed = smooth(y, max(1, len(y) // 60))
        series += [Series(name="raw", x=x, y=y, kind="faint"), Series(name="training", x=x, y=smoothed)]
    if ex:
        series.append(Series(name="validation", x=ex, y=ey, colour=2, kind="dots"))
    return line_chart(
        series,
        label=f"Training and validation loss in {unit} over steps",
        x_label="step",
        y_label=unit,
        width=width,
        height=height,
        y_top=top(y or ey),
        levels=levels if bits else (),
        y_text=decimals,
        points=500,
    )


def top(values: Sequence[float]) -> float:
    """Return an upper limit of the y axis that excludes the steep initial drop, which would flatten the rest."""
    ordered = sorted(values)
    return max(ordered[int(0.93 * (len(ordered) - 1))], ordered[0]) * 1.02


Draw = Callable[[float, float], str | None]
"""Draws a figure at a given width and height; None if there is no data."""


TOKEN_SCALARS = (
    ("Learning rate", "lr", 1.0, "", 4, False),
    ("Gradient norm", "grad_norm", 1.0, "global norm, before clipping", 5, True),
    ("Throughput", "tokens_per_second", 1.0, "tokens per second", 3, False),
    ("Memory", "rss_bytes", 1e-9, "GB resident", 1, False),
    ("Commitment loss", "loss_commit", 1.0, "squared distance of keys to codes", 2, True),
    ("Waiting for data", "wait_share", 100.0, "% of a step", 6, False),
)
"""Title, name in the metrics, factor, unit (empty: a scheduled value, not a measurement), colour, logarithmic."""


def small_figures(
    records: Sequence[Record], wanted: Sequence[tuple[str, str, float, str, int, bool]] = TOKEN_SCALARS
) -> Iterator[tuple[str, Draw]]:
    """Yield title and figure of each scalar that the run logged: raw and smoothed, from zero or logarithmic."""
    for title, name, scale, unit, colour, log in wanted:
        x, y = curve(records, "train", name, scale)
        if log:
            kept = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
            x, y = [a for a, _ in kept], [b for _, b in kept]
        if x:
            yield title, scalar_figure(title, x, y, unit, colour, log)


def scalar_figure(title: str, x: list[float], y: list[float], unit: str, colour: int, log: bool) -> Draw:
    exact = not unit  # a schedule such as the learning rate is not noisy: do not smooth it
    series = [Series(name=title.lower(), x=x, y=y if exact else smooth(y, max(1, len(y) // 60)), colour=colour)]
    if not exact:
        series.insert(0, Series(name="raw", x=x, y=y, colour=colour, kind="faint"))

    def draw(width: float, height: float) -> str:
        return line_chart(
            series,
            label=f"{title} over steps",
            x_label="step",
            y_label=unit,
            log_y=log,
            from_zero=not log,
            width=width,
            height=height,
        )

    return draw


def per_part(record: Record, group: str, name: str) -> list[float | None]:
    """Return one diagnostic of the model, one value per part (unit or layer); empty if it is missing."""
    figures = record.get(group)
    values = figures.get(name) if isinstance(figures, dict) else None
    return [finite(v) for v in values[:MAX_PARTS]] if isinstance(values, list) else []


def measured(records: Sequence[Record], group: str) -> list[Record]:
    """Return the training records that contain the group, ordered by step."""
    return sorted(
        (r for r in records if r.get("kind") == "train" and isinstance(r.get(group), dict)), key=lambda r: r["step"]
    )


def moments(lines: Sequence[Record], n_row: int, width: float) -> list[Record]:
    """Select records evenly over time as columns of a heat map; fewer for many rows, to limit the page size."""
    most = min(int(width / 17), max(4, 1200 // n_row), len(lines))
    return [lines[round(i)] for i in np.linspace(0, len(lines) - 1, most)]


def spread_figure(
    records: Sequence[Record], group: str, name: str, unit: str, width: float, height: float
) -> str | None:
    """Draw minimum, mean and maximum of one diagnostic over the parts."""
    rows_: list[tuple[float, float, float, float]] = []
    for record in records:
        values = [v for v in per_part(record, group, name) if v is not None]
        if values:
            rows_.append((float(record["step"]), min(values), sum(values) / len(values), max(values)))
    if not rows_:
        return None
    x, low, mean, high = (list(column) for column in zip(*sorted(rows_), strict=True))
    series = [
        Series(name="greatest", x=x, y=high, colour=3),
        Series(name="mean", x=x, y=mean, colour=1),
        Series(name="least", x=x, y=low, colour=5),
    ]
    words = f"{unit} over steps"
    return line_chart(series, label=words, x_label="step", y_label=unit, width=width, height=height)


def part_table(
    record: Record, group: str, part: str, kinds: Sequence[tuple[str, str, Callable[[float], str]]]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table with one row per part and one column per diagnostic in the record."""
    found = [(title, form, values) for name, title, form in kinds if (values := per_part(record, group, name))]
    n_part = max((len(values) for _, _, values in found), default=0)

    def cell(values: list[float | None], i: int, form: Callable[[float], str]) -> str:
        value = values[i] if i < len(values) else None
        return "–" if value is None else form(value)

    body = [[str(i), *(cell(values, i, form) for _, form, values in found)] for i in range(n_part)]
    return [part, *(title for title, _, _ in found)], body


def compressor_figure(model: float, others: Sequence[tuple[str, float]], width: float) -> str:
    entries = [("this model", model, 1), *((name, value, 6) for name, value in sorted(others, key=lambda o: -o[1]))]
    return rows(entries, label="Bits per byte of this model and of compressors", width=width, y_text=decimals)


# Loss by position: whether longer context helps.


Bucket = tuple[int, int | None, float]
"""First position, end position (exclusive; None if unbounded), loss."""


def buckets(edges: Sequence[Any], losses: Sequence[Any]) -> list[Bucket]:
    """Return the buckets that have a finite loss."""
    return list(numbered_buckets(edges, losses).values())


def numbered_buckets(edges: Sequence[Any], losses: Sequence[Any]) -> dict[int, Bucket]:
    """Return the buckets that have a finite loss, by their index in the file."""
    found: dict[int, Bucket] = {}
    for i, raw in enumerate(losses):
        start = finite(edges[i]) if i < len(edges) else None
        end = finite(edges[i + 1]) if i + 1 < len(edges) else None
        loss = finite(raw)
        if start is not None and start >= 0 and loss is not None:
            found[i] = (int(start), None if end is None else int(end), loss)
    return found


def position_words(by: Mapping[str, Any]) -> str:
    """Summarize `ByPosition.to_json()` in a sentence: whether the last positions have a lower loss than early ones.

    Gives a verdict only if there are standard errors, which evaluations by earlier versions lack.
    """
    found = buckets(by["edges"], by["loss"])
    chosen = compared_bins([start for start, _, _ in found], [loss for _, _, loss in found])
    if chosen is None:
        return "Too few positions to tell whether longer context helps."
    early, last = (found[i] for i in chosen)
    change = by.get("change")
    error = finite(change.get("standard_error")) if isinstance(change, Mapping) else None
    gain, margin = (early[2] - last[2]) * BITS, None if error is None else error * BITS
    amount = f"{abs(gain):.4f}" + ("" if margin is None else f" ± {margin:.4f}")
    compared = (
        f"The loss at positions {bucket_name(*last[:2])} is {amount} bits per token {'lower' if gain >= 0 else 'higher'} than at "
        f"positions {bucket_name(*early[:2])}"
    )
    if margin is None or not isinstance(change, Mapping):
        return f"{compared}; the standard error is not known, so this may be chance."
    over = f"(± one standard error over {finite(change.get('sequences')) or 0:,.0f} sequences)"
    if abs(gain) <= SIGNIFICANT * margin:
        return f"{compared} {over}: no more than chance, so this does not show that longer context helps or harms."
    verdict = "helps" if gain > 0 else "does not help"
    best = min(found, key=lambda bucket: bucket[2])
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
    found = numbered_buckets(by["edges"], by["loss"])
    most = max((loss for _, _, loss in found.values()), default=0.0)
    for i, (start, end, loss) in found.items():
        bar = "█" * round(24 * loss / most) if most > 0 else ""
        error = finite(errors[i]) if i < len(errors) else None
        shown = "" if error is None else f"± {error * BITS:.4f}"
        table.add_row(bucket_name(start, end), f"{loss:.4f}", f"{loss * BITS:.4f}", shown, bar)
    return table


def bucket_name(start: int, end: int | None) -> str:
    if end is None:
        return f"{start:,}+"
    return f"{start:,}" if end - start <= 1 else f"{start:,}–{end - 1:,}"


def position_chart(edges: Sequence[Any], losses: Sequence[Any], width: float = 420, height: float = 230) -> str | None:
    """Draw the loss over the position in the sequence, counted from 1; the axis is logarithmic for wide ranges."""
    found = buckets(edges, losses)
    if not found:
        return None
    middles = [math.sqrt((a + 1) * max(b if b is not None else a + 1, a + 1)) for a, b, _ in found]
    shown = Series(name="loss", x=middles, y=[loss * BITS for _, _, loss in found], kind="dots")
    return line_chart(
        [shown],
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
    chart = position_chart(edges, losses, width=640, height=340)
    assert chart is not None, "no bucket holds a number"
    return standalone(chart, "Loss by position in the sequence")
