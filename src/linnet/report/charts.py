"""Line charts, bar charts and heat maps as SVG text. Pure functions: the same data gives the same bytes.

The charts load no resources and need no scripts; values under the pointer are shown with CSS.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from linnet.report.svg import (
    LETTER,
    LEVELS,
    Scale,
    across,
    compact,
    linear_ticks,
    log_ticks,
    make_scale,
    number,
    rect,
    text,
    tick_words,
    wrap,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. Use `faint` for raw values behind their smoothed curve, and `dots` for sparse measurements."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 1
    kind: Literal["line", "faint", "dots"] = "line"


def thin(x: Sequence[float], y: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """Reduce a curve to about `limit` points, keeping the minimum and maximum of each interval."""
    n = len(x)
    if n <= limit:
        return list(x), list(y)
    edges = [round(i * n / (limit // 2)) for i in range(limit // 2 + 1)]
    kept: set[int] = {0, n - 1}
    for a, b in itertools.pairwise(edges):
        kept |= {min(range(a, b), key=y.__getitem__), max(range(a, b), key=y.__getitem__)}
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_label: str,
    width: float = 420,
    height: float = 230,
    log_x: bool = False,
    log_y: bool = False,
    y_top: float | None = None,
    from_zero: bool = False,
    levels: Sequence[tuple[str, float]] = (),
    y_text: Callable[[float], str] = compact,
    points: int = 400,
) -> str:
    """Draw curves over a common x axis. `levels` are dashed reference lines; values above `y_top` are clipped."""
    shown = [s for s in series if len(s.x)]
    ys = [v for s in shown for v in s.y if y_top is None or v <= y_top] + [value for _, value in levels]
    ys += [0.0] if from_zero else []
    rows = _legend_rows([s for s in shown if s.kind != "faint"], y_label, width)
    top, bottom = 14.0 + 20 * rows, height - 38
    y_scale = make_scale(ys, bottom, top, log=log_y, pad=0.05)
    ticks = _ticks(y_scale, int((bottom - top) / 44), base=10)
    names = tick_words(ticks)
    left = 12 + LETTER * max(map(len, names), default=1)
    right = width - 12
    x_scale = make_scale([v for s in shown for v in s.x], left, right, log=log_x)

    parts = [text(0, 12, y_label), *_legend([s for s in shown if s.kind != "faint"], width, rows)]
    for tick, name in zip(ticks, names, strict=True):
        y = y_scale(tick)
        parts.append(across(left, y, right, "grid"))
        parts.append(text(left - 7, y + 4, name, "end"))
    parts.append(across(left, bottom, right, "base"))
    room = int((right - left) / 72)
    for tick in _ticks(x_scale, room, base=2):
        words, x = compact(tick), x_scale(tick)
        over = x + len(words) * LETTER / 2 > width  # keep the last label inside the image
        parts.append(text(width if over else x, bottom + 17, words, "end" if over else "middle"))
    parts.append(text((left + right) / 2, height - 4, x_label, "middle"))
    parts += _levels(levels, y_scale, left, right, y_text)

    # A nested <svg> clips the curves without clip-path ids, which could clash on a page.
    box = f"{number(left - 4)} {number(top - 4)} {number(right - left + 8)} {number(bottom - top + 8)}".split()
    inner = "".join(_curve(s, x_scale, y_scale, points) for s in shown)
    parts.append(
        f'<svg x="{box[0]}" y="{box[1]}" width="{box[2]}" height="{box[3]}" viewBox="{" ".join(box)}">{inner}</svg>'
    )
    parts += _readouts(shown, x_scale, y_scale, x_label, y_text, most=int(width / 16))
    return wrap(parts, width, height, label)


def _ticks(scale: Scale, count: int, base: int) -> list[float]:
    return log_ticks(scale.low, scale.high, count, base) if scale.log else linear_ticks(scale.low, scale.high, count)


def _nearest(sorted_values: Sequence[float], value: float) -> int:
    i = bisect.bisect_left(sorted_values, value)
    return min((j for j in (i - 1, i) if 0 <= j < len(sorted_values)), key=lambda j: abs(sorted_values[j] - value))


def _legend_rows(series: Sequence[Series], y_label: str, width: float) -> int:
    if len(series) < 2:
        return 1 if y_label else 0
    return 1 if len(y_label) * LETTER + _legend_width(series) + 24 <= width else 2


def _legend_width(series: Sequence[Series]) -> float:
    return sum(34 + len(s.name) * LETTER for s in series) - 14


def _legend(series: Sequence[Series], width: float, rows: int) -> list[str]:
    if len(series) < 2:
        return []
    x, y = (width - _legend_width(series), 12.0) if rows == 1 else (0.0, 32.0)
    parts: list[str] = []
    for s in series:
        parts.append(rect(x, y - 6, 12, 4, f"f{s.colour}", radius=2))
        parts.append(text(x + 17, y, s.name))
        x += 34 + len(s.name) * LETTER
    return parts


def _levels(
    levels: Sequence[tuple[str, float]], scale: Scale, left: float, right: float, y_text: Callable[[float], str]
) -> list[str]:
    parts: list[str] = []
    labels: list[tuple[float, list[str]]] = []
    for name, value in sorted(levels, key=lambda level: -level[1]):
        y = scale(value)
        parts.append(across(left, y, right, "level"))
        if labels and y - labels[-1][0] < 14:  # labels would overlap: merge them
            labels[-1][1].append(f"{name} {y_text(value)}")
        else:
            labels.append((y, [f"{name} {y_text(value)}"]))
    # On the left, where a falling curve is still high; outlined (style `note`) in case a line crosses them.
    return parts + [text(left + 6, y - 5, ", ".join(names), style="note") for y, names in labels]


def _curve(series: Series, x_scale: Scale, y_scale: Scale, points: int) -> str:
    xs, ys = thin(series.x, series.y, points)
    spots = [(number(x_scale(x)), number(y_scale(y))) for x, y in zip(xs, ys, strict=True)]
    colour = series.colour
    dots = "".join(f'<circle class="dot f{colour}" cx="{x}" cy="{y}" r="4"/>' for x, y in spots)
    if len(spots) == 1:
        return dots
    faint = " faint" if series.kind == "faint" else ""
    path = f'<path class="line{faint} s{colour}" d="M{"L".join(f"{x} {y}" for x, y in spots)}"/>'
    return path + dots if series.kind == "dots" and len(spots) <= 60 else path


def _readouts(
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale,
    x_label: str,
    y_text: Callable[[float], str],
    most: int,
) -> list[str]:
    """Return invisible stripes over the plot that show their values on hover."""
    main = [s for s in series if s.kind != "faint"]
    if not main:
        return []
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    every = max(main, key=lambda s: len(s.x)).x
    places = sorted(set(every[:: max(1, math.ceil(len(every) / most))]) | {every[-1]})
    pixels = [x_scale(v) for v in places]
    parts: list[str] = []
    for i, (value, x) in enumerate(zip(places, pixels, strict=True)):
        a = (pixels[i - 1] + x) / 2 if i else left
        b = (pixels[i + 1] + x) / 2 if i + 1 < len(pixels) else right
        lines = [f"{x_label} {value:,.0f}"]
        for s in main:
            near = _nearest(s.x, value)
            if a - 1 <= x_scale(s.x[near]) <= b + 1:
                lines.append(f"{s.name} {y_text(s.y[near])}")
        wide = 16 + max(map(len, lines)) * LETTER
        at = x + 10 if x + 10 + wide <= right else max(left, x - 10 - wide)
        words = "".join(text(at + 8, top + 17 + 16 * j, w, style="" if j else "strong") for j, w in enumerate(lines))
        zone = rect(a, top, max(b - a, 1.0), bottom - top, "zone")
        rule = f'<path class="rule" d="M{number(x)} {number(top)}V{number(bottom)}"/>'
        box = rect(at, top, wide, 9.0 + 16 * len(lines), "box", radius=6)
        parts.append(f'<g class="hit">{zone}<g class="tip">{rule}{box}{words}</g></g>')
    return parts


def columns(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    label: str,
    x_label: str,
    y_label: str,
    ceiling: tuple[str, float] | None = None,
    width: float = 420,
    height: float = 230,
    colour: int = 1,
) -> str:
    """Draw one vertical bar per label; `ceiling` is a dashed line at the maximum possible value."""
    top, bottom = 32.0, height - 38
    high = max([*values, ceiling[1] if ceiling else 0.0]) or 1.0
    scale = Scale(0.0, high * 1.12, bottom, top)
    ticks = linear_ticks(0.0, scale.high, int((bottom - top) / 36))
    left, right = 12 + LETTER * max(len(compact(t)) for t in ticks), width - 10
    parts = [text(0, 12, y_label)]
    for tick in ticks:
        parts.append(across(left, scale(tick), right, "grid"))
        parts.append(text(left - 7, scale(tick) + 4, compact(tick), "end"))
    pitch = (right - left) / max(len(values), 1)
    thick = min(pitch * 0.72, 44)
    every = max(1, math.ceil((max(map(len, labels), default=1) * LETTER + 8) / pitch))
    for i, (name, value) in enumerate(zip(labels, values, strict=True)):
        middle, y = left + pitch * (i + 0.5), scale(value)
        title = f"{x_label} {name}: {compact(value)}"
        parts.append(rect(middle - thick / 2, y, thick, bottom - y, f"f{colour}", radius=2, title=title))
        if i % every == 0:
            parts.append(text(middle, bottom + 17, name, "middle"))
    parts.append(across(left, bottom, right, "base"))
    parts += _levels([ceiling] if ceiling else [], scale, left, right, compact)
    parts.append(text((left + right) / 2, height - 4, x_label, "middle"))
    return wrap(parts, width, height, label)


def rows(
    entries: Sequence[tuple[str, float, int]],
    *,
    label: str,
    width: float = 420,
    y_text: Callable[[float], str] = compact,
) -> str:
    """Draw one horizontal bar per entry (name, value, colour), with the value at its end."""
    left = 14 + LETTER * 1.1 * max(len(name) for name, _, _ in entries)
    longest = max(value for _, value, _ in entries) or 1.0
    room = width - left - LETTER * 1.2 * max(len(y_text(value)) for _, value, _ in entries) - 8
    parts: list[str] = []
    for i, (name, value, colour) in enumerate(entries):
        y, long = 30.0 * i, max(value / longest * room, 2.0)
        strong = "" if colour == 6 else "strong"
        parts.append(text(left - 12, y + 18, name, "end", strong))
        parts.append(rect(left, y + 4, long, 20, f"f{colour}", radius=4))
        parts.append(text(left + long + 8, y + 18, y_text(value), style=strong))
    return wrap(parts, width, 30.0 * len(entries), label)


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
) -> str:
    """Draw a row of cells per list of values, in stronger colours for greater values; `x` are the columns' coordinates."""
    tall = 22.0 if len(values) <= 10 else max(7.0, 220.0 / len(values))
    left, right, top = 14 + LETTER * max(2, len(str(len(values)))), width - 10, 34.0
    bottom = top + tall * len(values)
    wide = (right - left) / max(len(x), 1)
    parts = [text(0, 12, y_label), *heat_legend(low, high, width, y_text)]
    every = max(1, math.ceil(14 / tall))
    for r, row in enumerate(values):
        if r % every == 0:
            parts.append(text(left - 7, top + tall * (r + 0.5) + 4, str(r), "end"))
        for c, value in enumerate(row):
            if value is None:
                continue
            share = min(max((value - low) / (high - low), 0.0), 1.0)
            shade, title = f"h{round(share * (LEVELS - 1))}", f"{y_label} {r}, {x_label} {x[c]:,.0f}: {y_text(value)}"
            over = 0.6 if c + 1 < len(row) else 0.0
            parts.append(rect(left + wide * c, top + tall * r, wide + over, tall - 1, shade, title=title))
    gap = max(1, math.ceil(len(x) / ((right - left) / 70)))
    for c in range(0, len(x), gap):
        parts.append(text(left + wide * (c + 0.5), bottom + 17, compact(x[c]), "middle"))
    parts.append(text((left + right) / 2, bottom + 34, x_label, "middle"))
    return wrap(parts, width, bottom + 38, label)


def heat_legend(low: float, high: float, width: float, y_text: Callable[[float], str]) -> list[str]:
    """Return the colour scale, for the upper right corner."""
    end, begin = y_text(high), y_text(low)
    x = width - 10 - len(end) * LETTER - 84
    cells = "".join(rect(x + 4 * i, 4, 4.5, 9, f"h{i}") for i in range(LEVELS))
    return [text(x - 6, 12, begin, "end"), cells, text(x + 86, 12, end)]
