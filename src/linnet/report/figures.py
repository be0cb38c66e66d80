"""Figures that reports of several families share: losses, scalars over time, diagnostics per part of the model, headline tiles."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from linnet.report.charts import Series, line_chart
from linnet.report.heat_maps import heat_map
from linnet.report.metrics import Record, RunData, per_part
from linnet.report.page import Figure, Section, Table, Tile, columns, figure, format_cell, half_figure, section
from linnet.report.svg import Chart, compact

Diagnostic = tuple[str, str, Callable[[float], str]]
"""Name in the metrics, title of its column, and format."""


def smooth(values: Sequence[float], half: int | None = None) -> list[float]:
    """Return the moving average over `half` neighbours on each side; the window shrinks symmetrically at the ends."""
    n = len(values)
    half = max(1, n // 60) if half is None else half
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    reach = [min(half, i, n - 1 - i) for i in range(n)]
    return [float(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]


def decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else compact(value)


# Tiles


def best_tile(title: str, curve: tuple[Sequence[float], Sequence[float]], digits: int) -> Tile | None:
    """Return the last validation value of a metric, and where its minimum was; None if it was never measured."""
    steps, values = curve
    if not values:
        return None
    best = min(range(len(values)), key=values.__getitem__)
    note = "its best" if values[best] == values[-1] else f"best {values[best]:.{digits}f} at step {steps[best]:,.0f}"
    return Tile(title, f"{values[-1]:.{digits}f}", f"validation; {note}")


def throughput_tile(title: str, run: RunData, name: str) -> Tile | None:
    speeds, shares = (run.curve("train", metric)[1] for metric in (name, "mfu"))
    if not speeds:
        return None
    note = f"{100 * statistics.median(shares):.0f}% of peak FLOP/s" if shares else "median"
    return Tile(title, compact(statistics.median(speeds)), note)


# Losses and scalars over training


def loss_figure(
    run: RunData,
    name: str,
    unit: str,
    validation: Sequence[Series],
    *,
    height: float,
    levels: Sequence[tuple[str, float]] = (),
    y_text: Callable[[float], str] = decimals,
) -> Figure | None:
    """Draw the training loss, raw and smoothed, and validation losses. The scale excludes the steep initial drop."""
    x, y = run.curve("train", name)
    series = [Series(name="raw", x=x, y=y, kind="faint"), Series(name="training", x=x, y=smooth(y))] if x else []
    series += validation
    if not series:
        return None
    draw = functools.partial(
        line_chart, series, label=f"Training and validation loss in {unit} over steps", x_label="step", y_label=unit,
        y_top=_upper_limit([v for s in series if s.kind != "faint" for v in s.y]), levels=levels, y_text=y_text, points=500,
    )  # fmt: skip
    return figure("", draw, height=height)


def _upper_limit(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return max(ordered[int(0.93 * (len(ordered) - 1))], ordered[0]) * 1.02


Scalar = tuple[str, str, float, str, int, bool]
"""Title, name in the metrics, factor, unit (empty: a scheduled value, not a measurement), colour, logarithmic."""

LEARNING_RATE: Scalar = ("Learning rate", "lr", 1.0, "", 4, False)
GRADIENT_NORM: Scalar = ("Gradient norm", "grad_norm", 1.0, "global norm, before clipping", 5, True)
MEMORY: Scalar = ("Memory", "rss_bytes", 1e-9, "GB resident", 1, False)
DATA_WAIT: Scalar = ("Waiting for data", "wait_share", 100.0, "% of step time", 6, False)


def training_section(run: RunData, scalars: Iterable[Scalar]) -> Section | None:
    shown = columns(scalar_figure(run, scalar) for scalar in scalars)
    return section("Training", shown) if shown else None


def scalar_figure(run: RunData, scalar: Scalar) -> Figure | None:
    """Draw a scalar that the run logged: raw and smoothed, from zero or logarithmic. None if it was not logged."""
    title, name, scale, unit, colour, log = scalar
    points = [(a, b) for a, b in zip(*run.curve("train", name, scale), strict=True) if b > 0 or not log]
    if not points:
        return None
    x, y = (list(values) for values in zip(*points, strict=True))
    exact = not unit  # a schedule such as the learning rate is not noisy: do not smooth it
    series = [Series(name=title.lower(), x=x, y=y if exact else smooth(y), colour=colour)]
    if not exact:
        series.insert(0, Series(name="raw", x=x, y=y, colour=colour, kind="faint"))
    draw = functools.partial(
        line_chart, series, label=f"{title} over steps", x_label="step", y_label=unit, log_y=log, from_zero=not log
    )
    return half_figure(title, draw)


# Diagnostics with a value per part of the model (a unit or a layer)


def spread_figure(title: str, records: Sequence[Record], group: str, name: str, unit: str) -> Figure | None:
    """Draw minimum, mean and maximum of one diagnostic over the parts."""
    rows: list[tuple[float, float, float, float]] = []
    for record in records:
        values = [v for v in per_part(record, group, name) if v is not None]
        if values:
            rows.append((float(record["step"]), min(values), sum(values) / len(values), max(values)))
    if not rows:
        return None
    x, low, mean, high = (list(column) for column in zip(*sorted(rows), strict=True))
    series = [
        Series(name="max", x=x, y=high, colour=3),
        Series(name="mean", x=x, y=mean, colour=1),
        Series(name="min", x=x, y=low, colour=5),
    ]
    draw = functools.partial(line_chart, series, label=f"{unit} over steps", x_label="step", y_label=unit)
    return half_figure(title, draw)


def heat_map_over_steps(
    rows: Sequence[tuple[float, Sequence[float | None]]],
    *,
    label: str,
    y_label: str,
    high: float,
    y_text: Callable[[float], str],
    cost: int = 1,
) -> Callable[..., Chart]:
    """Return a function that draws one row of cells per part and one column per step.

    There are fewer columns where there are many parts, to limit the page size; `cost` is the number of such maps in a column.
    """
    n_part = max(len(values) for _, values in rows)

    def draw(*, width: float) -> Chart:
        limit = min(int(width / 17), max(4, 1200 // (cost * n_part)), len(rows))
        chosen = [rows[round(i)] for i in np.linspace(0, len(rows) - 1, limit)]
        cells = [[([*values, *[None] * n_part])[part] for _, values in chosen] for part in range(n_part)]
        steps = [step for step, _ in chosen]
        return heat_map(
            cells, steps, label=label, x_label="step", y_label=y_label, low=0.0, high=high, width=width, y_text=y_text
        )

    return draw


def part_table(record: Record, group: str, part: str, diagnostics: Sequence[Diagnostic]) -> Table | None:
    """Return a table with one row per part and one column per diagnostic in the record."""
    shown = [(title, form, values) for name, title, form in diagnostics if (values := per_part(record, group, name))]
    if not shown:
        return None
    n_part = max(len(values) for _, _, values in shown)

    def cell(values: list[float | None], i: int, form: Callable[[float], str]) -> str:
        value = values[i] if i < len(values) else None
        return format_cell(None, "") if value is None else form(value)

    rows = [[str(i), *(cell(values, i, form) for _, form, values in shown)] for i in range(n_part)]
    head = [part, *(title for title, _, _ in shown)]
    return Table(head, rows, range(1, len(head)), title=f"Every {part} at step {record['step']:,}")
