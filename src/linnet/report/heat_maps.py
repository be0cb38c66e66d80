"""Heat maps as SVG: values over time per row, and square matrices with captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from linnet.report.svg import LETTER, LEVELS, Chart, compact, join, number, rect, text

MIN_CELL = 16.0
"""Minimum cell size of a matrix in pixels: a line of text. In less space fewer rows are drawn, so that all are legible."""


def heat_map(
    values: Sequence[Sequence[float | None]],
    x: Sequence[float],
    *,
    label: str,
    x_label: str,
    y_label: str,
    low: float,
    high: float,
    width: float = 420,
    y_text: Callable[[float], str] = compact,
) -> Chart:
    """Draw a row of cells per list of values, in stronger colours for greater values; `x` are the columns' coordinates."""
    tall = 22.0 if len(values) <= 10 else max(7.0, 220.0 / len(values))
    left, right, top = 14 + LETTER * max(2, len(str(len(values)))), width - 10, 34.0
    bottom = top + tall * len(values)
    wide = (right - left) / max(len(x), 1)
    parts = [text(0, 12, y_label), *_legend(low, high, width, y_text)]
    every = max(1, math.ceil(14 / tall))
    for r, row in enumerate(values):
        if r % every == 0:
            parts.append(text(left - 7, top + tall * (r + 0.5) + 4, str(r), "end"))
        for c, value in enumerate(row):
            if value is None:
                continue
            title = f"{y_label} {r}, {x_label} {x[c]:,.0f}: {y_text(value)}"
            over = 0.6 if c + 1 < len(row) else 0.0
            shade = _shade(value, low, high)
            parts.append(rect(left + wide * c, top + tall * r, wide + over, tall - 1, shade, title=title))
    gap = max(1, math.ceil(len(x) / ((right - left) / 70)))
    for c in range(0, len(x), gap):
        parts.append(text(left + wide * (c + 0.5), bottom + 17, compact(x[c]), "middle"))
    parts.append(text((left + right) / 2, bottom + 34, x_label, "middle"))
    return Chart(parts, width, bottom + 38, label)


def matrix_chart(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    label: str,
    row_label: str,
    column_label: str,
    width: float = 1040,
) -> Chart:
    """Draw a matrix in stronger colours for greater values, from its minimum to its maximum. Nonfinite values are blank."""
    gutter = min(0.4 * width, 14 + LETTER * max(map(len, names)), 230.0)
    letters = int((gutter - 14) / LETTER)
    shown = _select_evenly(len(names), int((width - gutter - 4) / MIN_CELL))
    short = [shorten(names[i], letters) for i in shown]
    cell = min((width - gutter - 4) / len(shown), 26.0)
    head = 14 + LETTER * max(map(len, short))  # the columns' captions are rotated
    top, inside = 40.0 + head, [values[r][c] for r in shown for c in shown if math.isfinite(values[r][c])]
    low, high = (min(inside), max(inside)) if inside else (0.0, 1.0)
    parts = [text(0, 12, f"{row_label} ↓, {column_label} →"), *_legend(low, high, width, lambda v: f"{v:.2f}")]
    for i, name in enumerate(short):
        middle = cell * (i + 0.5)
        parts.append(text(gutter - 8, top + middle + 4, name, "end"))
        x, y = gutter + middle + 4, top - 8
        parts.append(text(x, y, name, transform=f"rotate(-90 {number(x)} {number(y)})"))
    for r, row in enumerate(shown):
        for c, column in enumerate(shown):
            value = values[row][column]
            if math.isfinite(value):
                title, shade = f"{short[r]} / {short[c]}: {value:.2f}", _shade(value, low, high)
                parts.append(rect(gutter + cell * c, top + cell * r, cell - 1, cell - 1, shade, title=title))
    return Chart(parts, width, top + cell * len(shown) + 4, label)


def _shade(value: float, low: float, high: float) -> str:
    """Return the CSS class of a value's colour."""
    share = min(max((value - low) / (high - low or 1.0), 0.0), 1.0)
    return f"h{round(share * (LEVELS - 1))}"


def _legend(low: float, high: float, width: float, y_text: Callable[[float], str]) -> list[Markup]:
    """Return the colour scale, for the upper right corner."""
    end, begin = y_text(high), y_text(low)
    x = width - 10 - len(end) * LETTER - 84
    cells = join([rect(x + 4 * i, 4, 4.5, 9, f"h{i}") for i in range(LEVELS)])
    return [text(x - 6, 12, begin, "end"), cells, text(x + 86, 12, end)]


def _select_evenly(n: int, limit: int) -> list[int]:
    kept = max(1, min(n, limit))
    return [i * n // kept for i in range(kept)]


def shorten(caption: str, letters: int) -> str:
    """Shorten a caption to one line of at most `letters` characters, with an ellipsis if truncated."""
    line = " ".join(caption.split())
    return line if len(line) <= letters else line[: max(letters - 1, 1)].rstrip(" ,;:") + "…"
