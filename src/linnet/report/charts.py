"""Line charts and bar charts as SVG. Pure functions: the same data gives the same bytes.

The charts load no resources and need no scripts; values under the pointer are shown with CSS. They are not drawn by
matplotlib, whose SVG has fixed colours (no dark mode), no values on hover, and is larger.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from markupsafe import Markup

from linnet.report.svg import (
    LETTER,
    Chart,
    Scale,
    across,
    compact,
    element,
    format_ticks,
    join,
    make_scale,
    number,
    rect,
    text,
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
) -> Chart:
    """Draw curves over a common x axis. `levels` are dashed reference lines; values above `y_top` are clipped."""
    shown = [s for s in series if len(s.x)]
    named = [s for s in shown if s.kind != "faint"]
    ys = [v for s in shown for v in s.y if y_top is None or v <= y_top] + [value for _, value in levels]
    ys += [0.0] if from_zero else []
    rows = _legend_rows(named, y_label, width)
    top, bottom = 14.0 + 20 * rows, height - 38
    y_scale = make_scale(ys, bottom, top, log=log_y, pad=0.05)
    ticks = y_scale.ticks(int((bottom - top) / 44))
    left, right, grid = _y_axis(y_scale, ticks, format_ticks(ticks), width - 12)
    x_scale = make_scale([v for s in shown for v in s.x], left, right, log=log_x)

    parts = [*_labels(x_label, y_label, left, right, height), *_legend(named, width, rows), *grid]
    parts.append(across(left, bottom, right, "base"))
    for tick in x_scale.ticks(int((right - left) / 72), base=2):
        name, x = compact(tick), x_scale(tick)
        over = x + len(name) * LETTER / 2 > width  # keep the last label inside the image
        parts.append(text(width if over else x, bottom + 17, name, "end" if over else "middle"))
    parts += _levels(levels, y_scale, left, right, y_text)

    # A nested <svg> clips the curves without clip-path ids, which could clash on a page.
    inner = join([_curve(s, x_scale, y_scale, points) for s in shown])
    x, y, w, h = left - 4, top - 4, right - left + 8, bottom - top + 8
    box = " ".join(map(number, (x, y, w, h)))
    parts.append(element("svg", inner, x=x, y=y, width=w, height=h, viewBox=box))
    parts += _readouts(named, x_scale, y_scale, x_label, y_text, limit=int(width / 16))
    return Chart(parts, width, height, label)


def _y_axis(
    scale: Scale, ticks: Sequence[float], names: Sequence[str], right: float
) -> tuple[float, float, list[Markup]]:
    """Return the left and right end of the plot, and the grid with the names of its lines."""
    left = 12 + LETTER * max(map(len, names), default=1)
    parts: list[Markup] = []
    for tick, name in zip(ticks, names, strict=True):
        parts.append(across(left, scale(tick), right, "grid"))
        parts.append(text(left - 7, scale(tick) + 4, name, "end"))
    return left, right, parts


def _labels(x_label: str, y_label: str, left: float, right: float, height: float) -> list[Markup]:
    return [text(0, 12, y_label), text((left + right) / 2, height - 4, x_label, "middle")]


def _nearest(sorted_values: Sequence[float], value: float) -> int:
    i = bisect.bisect_left(sorted_values, value)
    return min((j for j in (i - 1, i) if 0 <= j < len(sorted_values)), key=lambda j: abs(sorted_values[j] - value))


def _legend_rows(series: Sequence[Series], y_label: str, width: float) -> int:
    if len(series) < 2:
        return 1 if y_label else 0
    return 1 if len(y_label) * LETTER + _legend_width(series) + 24 <= width else 2


def _legend_width(series: Sequence[Series]) -> float:
    return sum(34 + len(s.name) * LETTER for s in series) - 14


def _legend(series: Sequence[Series], width: float, rows: int) -> list[Markup]:
    if len(series) < 2:
        return []
    x, y = (width - _legend_width(series), 12.0) if rows == 1 else (0.0, 32.0)
    parts: list[Markup] = []
    for s in series:
        parts.append(rect(x, y - 6, 12, 4, f"f{s.colour}", radius=2))
        parts.append(text(x + 17, y, s.name))
        x += 34 + len(s.name) * LETTER
    return parts


def _levels(
    levels: Sequence[tuple[str, float]], scale: Scale, left: float, right: float, y_text: Callable[[float], str]
) -> list[Markup]:
    parts: list[Markup] = []
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


def _curve(series: Series, x_scale: Scale, y_scale: Scale, points: int) -> Markup:
    xs, ys = thin(series.x, series.y, points)
    spots = [(x_scale(x), y_scale(y)) for x, y in zip(xs, ys, strict=True)]
    colour = series.colour
    dots = join([element("circle", class_=f"dot f{colour}", cx=x, cy=y, r=4) for x, y in spots])
    if len(spots) == 1:
        return dots
    line = "L".join(f"{number(x)} {number(y)}" for x, y in spots)
    path = element("path", class_=f"line{' faint' if series.kind == 'faint' else ''} s{colour}", d=f"M{line}")
    return path + dots if series.kind == "dots" and len(spots) <= 60 else path


def _readouts(
    series: Sequence[Series],
    x_scale: Scale,
    y_scale: Scale,
    x_label: str,
    y_text: Callable[[float], str],
    limit: int,
) -> list[Markup]:
    """Return at most about `limit` invisible stripes over the plot that show their values on hover."""
    if not series:
        return []
    left, right, bottom, top = x_scale.start, x_scale.end, y_scale.start, y_scale.end
    every = max(series, key=lambda s: len(s.x)).x
    stops = sorted(set(every[:: max(1, math.ceil(len(every) / limit))]) | {every[-1]})
    pixels = [x_scale(v) for v in stops]
    parts: list[Markup] = []
    for i, (value, x) in enumerate(zip(stops, pixels, strict=True)):
        a = (pixels[i - 1] + x) / 2 if i else left
        b = (pixels[i + 1] + x) / 2 if i + 1 < len(pixels) else right
        lines = [f"{x_label} {value:,.0f}"]
        for s in series:
            near = _nearest(s.x, value)
            if a - 1 <= x_scale(s.x[near]) <= b + 1:
                lines.append(f"{s.name} {y_text(s.y[near])}")
        wide = 16 + max(map(len, lines)) * LETTER
        at = x + 10 if x + 10 + wide <= right else max(left, x - 10 - wide)
        tip = [
            element("path", class_="rule", d=f"M{number(x)} {number(top)}V{number(bottom)}"),
            rect(at, top, wide, 9.0 + 16 * len(lines), "box", radius=6),
            *(text(at + 8, top + 17 + 16 * j, w, style="" if j else "strong") for j, w in enumerate(lines)),
        ]
        zone = rect(a, top, max(b - a, 1.0), bottom - top, "zone")
        parts.append(element("g", zone + element("g", join(tip), class_="tip"), class_="hit"))
    return parts


def column_chart(
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
) -> Chart:
    """Draw one vertical bar per label; `ceiling` is a dashed line at the maximum possible value."""
    top, bottom = 32.0, height - 38
    high = max([*values, ceiling[1] if ceiling else 0.0]) or 1.0
    scale = Scale(0.0, high * 1.12, bottom, top)
    ticks = scale.ticks(int((bottom - top) / 36))
    left, right, grid = _y_axis(scale, ticks, [compact(t) for t in ticks], width - 10)
    parts = [*_labels(x_label, y_label, left, right, height), *grid]
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
    return Chart(parts, width, height, label)


def row_chart(
    entries: Sequence[tuple[str, float, int]],
    *,
    label: str,
    width: float = 420,
    y_text: Callable[[float], str] = compact,
) -> Chart:
    """Draw one horizontal bar per entry (name, value, colour), with the value at its end."""
    left = 14 + LETTER * 1.1 * max(len(name) for name, _, _ in entries)
    longest = max(value for _, value, _ in entries) or 1.0
    room = width - left - LETTER * 1.2 * max(len(y_text(value)) for _, value, _ in entries) - 8
    parts: list[Markup] = []
    for i, (name, value, colour) in enumerate(entries):
        y, long = 30.0 * i, max(value / longest * room, 2.0)
        strong = "" if colour == 6 else "strong"
        parts.append(text(left - 12, y + 18, name, "end", strong))
        parts.append(rect(left, y + 4, long, 20, f"f{colour}", radius=4))
        parts.append(text(left + long + 8, y + 18, y_text(value), style=strong))
    return Chart(parts, width, 30.0 * len(entries), label)
