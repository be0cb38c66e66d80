"""A square matrix of cosines as SVG, with captions for rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from linnet.report.charts import heat_legend
from linnet.report.svg import LETTER, LEVELS, number, rect, text, wrap

MIN_CELL = 16.0
"""Minimum cell size in pixels, the height of a line of text. In less space fewer rows are drawn, so that all are legible."""


def matrix_chart(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    label: str,
    row_label: str,
    column_label: str,
    width: float = 1040,
) -> str:
    """Draw a matrix in stronger colours for greater values, from its minimum to its maximum. Nonfinite values are blank."""
    gutter = min(0.4 * width, 14 + LETTER * max(map(len, names)), 230.0)
    letters = int((gutter - 14) / LETTER)
    shown = _spread(len(names), int((width - gutter - 4) / MIN_CELL))
    short = [shorten(names[i], letters) for i in shown]
    cell = min((width - gutter - 4) / len(shown), 26.0)
    head = 14 + LETTER * max(map(len, short))  # the columns' captions are rotated
    top, inside = 40.0 + head, [values[r][c] for r in shown for c in shown if math.isfinite(values[r][c])]
    low, high = (min(inside), max(inside)) if inside else (0.0, 1.0)
    span = high - low or 1.0
    parts = [text(0, 12, f"{row_label} ↓, {column_label} →"), *heat_legend(low, high, width, lambda v: f"{v:.2f}")]
    for i, name in enumerate(short):
        middle = cell * (i + 0.5)
        parts.append(text(gutter - 8, top + middle + 4, name, "end"))
        x, y = number(gutter + middle + 4), number(top - 8)
        parts.append(f'<text x="{x}" y="{y}" transform="rotate(-90 {x} {y})">{escape(name)}</text>')
    for r, row in enumerate(shown):
        for c, column in enumerate(shown):
            value = values[row][column]
            if not math.isfinite(value):
                continue
            shade = f"h{round((value - low) / span * (LEVELS - 1))}"
            title = f"{short[r]} / {short[c]}: {value:.2f}"
            parts.append(rect(gutter + cell * c, top + cell * r, cell - 1, cell - 1, shade, title=title))
    return wrap(parts, width, top + cell * len(shown) + 4, label)


def _spread(n: int, most: int) -> list[int]:
    kept = max(1, min(n, most))
    return [i * n // kept for i in range(kept)]


def shorten(caption: str, letters: int) -> str:
    """Shorten a caption to one line of at most `letters` characters, with an ellipsis if truncated."""
    line = " ".join(caption.split())
    return line if len(line) <= letters else line[: max(letters - 1, 1)].rstrip(" ,;:") + "…"
