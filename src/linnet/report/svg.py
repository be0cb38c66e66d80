"""SVG primitives of the charts: colours, escaped elements, scales, ticks and number formats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

from linnet.report.templates import printable, render_template

LEVELS = 20
"""Number of shades in a heat map."""


def _with_shades(theme: dict[str, str]) -> dict[str, str]:
    """Add opaque shades from the card colour to the first colour. Opaque cells can overlap slightly, which hides seams."""

    def mix(share: float) -> str:
        ends = [(int(theme["card"][i : i + 2], 16), int(theme["c1"][i : i + 2], 16)) for i in (1, 3, 5)]
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in ends)

    return theme | {f"h{i}": mix(0.07 + 0.93 * i / (LEVELS - 1)) for i in range(LEVELS)}


LIGHT = _with_shades({
    "ink": "#18212d", "soft": "#5d6875", "line": "#e4e9ef", "card": "#ffffff", "page": "#f4f6f9", "raised": "#f8fafc",
    "c1": "#2f6fed", "c2": "#e2661b", "c3": "#12946f", "c4": "#8456e0", "c5": "#d13c6a", "c6": "#7c8896",
})  # fmt: skip
DARK = _with_shades({
    "ink": "#e8edf3", "soft": "#98a4b3", "line": "#2a323d", "card": "#161c24", "page": "#0d1117", "raised": "#1b222c",
    "c1": "#6aa2ff", "c2": "#ff9550", "c3": "#3ccf9f", "c4": "#b192ff", "c5": "#ff7aa0", "c6": "#8592a1",
})  # fmt: skip
VARIABLES = {name: f"var(--{name})" for name in LIGHT}
"""The theme whose colours are CSS variables, for charts inside a page."""

LETTER = 6.8  # estimated (upper) mean width of a letter at 12 px, for layout without font metrics


# Elements


def element(tag: str, body: str = "", /, **attributes: str | float) -> Markup:
    """Return an element; body and attributes are escaped, unless they are `Markup`. Empty attributes are left out.

    Attribute names are written as Python identifiers: `class_`, `text_anchor`. Numbers are rounded to one decimal.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for name, value in attributes.items()
        if value != ""
    )
    return Markup(f"<{tag}{named}>{_escaped(body)}</{tag}>" if body else f"<{tag}{named}/>")


def _escaped(value: str | float) -> Markup:
    return escape(printable(value) if isinstance(value, str) else number(value))


def join(parts: Sequence[str]) -> Markup:
    return Markup("").join(parts)


def number(x: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{x:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, anchor: str = "", style: str = "", transform: str = "") -> Markup:
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=style, transform=transform)


def rect(
    x: float, y: float, width: float, height: float, style: str, *, radius: float | str = "", title: str = ""
) -> Markup:
    note = element("title", title) if title else ""
    return element("rect", note, class_=style, x=x, y=y, width=width, height=height, rx=radius)


def across(x: float, y: float, to: float, style: str) -> Markup:
    """Return a horizontal line."""
    return element("path", class_=style, d=f"M{number(x)} {number(y)}H{number(to)}")


@dataclasses.dataclass(frozen=True)
class Chart:
    """A drawing that a template inserts as an `<svg>` element."""

    parts: Sequence[Markup]
    width: float
    height: float
    label: str
    """Description for screen readers."""

    def __html__(self) -> Markup:
        box = f"0 0 {number(self.width)} {number(self.height)}"
        return element("svg", join(self.parts), **SVG, viewBox=box, role="img", aria_label=self.label)

    __str__ = __html__

    def standalone(self, title: str) -> str:
        """Return a complete SVG file with a title, without CSS variables, which some viewers lack."""
        light, dark = (render_template("chart.css", theme=theme) for theme in (LIGHT, DARK))
        style = element("style", Markup(f"{light}@media(prefers-color-scheme:dark){{{dark}}}"))
        width, height = self.width + 40, self.height + 72
        sheet = rect(-20, -52, width, height, "sheet") + text(0, -20, title, style="title strong")
        box = f"-20 -52 {number(width)} {number(height)}"
        body = join([style, sheet, *self.parts])
        return (
            element("svg", body, **SVG, width=width, height=height, viewBox=box, role="img", aria_label=self.label)
            + "\n"
        )


SVG = {"xmlns": "http://www.w3.org/2000/svg", "class_": "chart"}


# Scales


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps a value to a coordinate, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (self.low, self.high, value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low * 1e-3))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int, base: int = 10) -> list[float]:
        """Return about `count` round values. `base` is that of a logarithmic scale."""
        count = max(count, 1)
        return log_ticks(self.low, self.high, count, base) if self.log else linear_ticks(self.low, self.high, count)


def make_scale(values: Sequence[float], start: float, end: float, *, log: bool = False, pad: float = 0.0) -> Scale:
    """Return a scale that covers all the values and has a nonempty range."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log:
        low, high = (low, high) if high > low else (low / 2, high * 2)
        room = (high / low) ** pad
        return Scale(low / room, high * room, start, end, log=True)
    if high - low <= abs(low) * 1e-9 + 1e-40:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    room = (high - low) * pad
    return Scale(low - room if low < 0 or low - room >= 0 else 0.0, high + room, start, end)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from low to high, spaced by 1, 2 or 5 times a power of ten."""
    span, wanted = high - low, max(count, 2)
    power = 10.0 ** math.floor(math.log10(span / wanted))
    gap = min((m * power for m in (1, 2, 5, 10)), key=lambda g: abs(math.log(span / g / wanted)))
    first, last = math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9)
    return [round(i * gap, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int, base: int) -> list[float]:
    """Return powers of the base, thinned to about `count`; for few powers of ten, also 2 and 5 times them."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    powers = [float(base) ** i for i in range(first, last + 1)]
    if base == 10 and len(powers) < 3:
        steps = (m * 10.0**i for i in range(first - 1, last + 1) for m in (1, 2, 5))
        return [v for v in steps if low <= v <= high * (1 + 1e-9)]
    return powers[:: max(1, math.ceil(len(powers) / count))]


# Numbers


def compact(value: float) -> str:
    """Format a number with at most four significant digits: `0.00042 -> 4.2e-4`, `1.234`, `12,345 -> 12.3k`, `3.1M`."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, unit, mark in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit * 0.9995:
            return f"{value / unit:.3g}{mark}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Format ticks with the same number of decimals: `1.5, 2.0`, not `1.5, 2`."""
    labels = [compact(tick) for tick in ticks]
    if any(mark in label for label in labels for mark in "ekMGT,"):
        return labels
    decimals = max((len(label.partition(".")[2]) for label in labels), default=0)
    return [f"{tick:.{decimals}f}" if tick else "0" for tick in ticks]
