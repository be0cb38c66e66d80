"""SVG primitives of the charts: light and dark colours as CSS variables, scales, ticks and elements."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from html import escape

LIGHT = {
    "ink": "#18212d", "soft": "#5d6875", "line": "#e4e9ef", "card": "#ffffff", "page": "#f4f6f9", "raised": "#f8fafc",
    "c1": "#2f6fed", "c2": "#e2661b", "c3": "#12946f", "c4": "#8456e0", "c5": "#d13c6a", "c6": "#7c8896",
}  # fmt: skip
DARK = {
    "ink": "#e8edf3", "soft": "#98a4b3", "line": "#2a323d", "card": "#161c24", "page": "#0d1117", "raised": "#1b222c",
    "c1": "#6aa2ff", "c2": "#ff9550", "c3": "#3ccf9f", "c4": "#b192ff", "c5": "#ff7aa0", "c6": "#8592a1",
}  # fmt: skip

STYLE = """
.chart{display:block;width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
.chart text{fill:var(--soft);font-variant-numeric:tabular-nums}
.chart .note{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.chart .strong{fill:var(--ink);font-weight:600}
.chart .grid{stroke:var(--line)}
.chart .base{stroke:var(--c6);opacity:.7}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .faint{stroke-width:1;opacity:.38}
.chart .level{stroke:var(--c6);stroke-dasharray:4 4}
.chart .dot{stroke:var(--card);stroke-width:1.5}
.chart .zone{fill:transparent}
.chart .tip{display:none;pointer-events:none}
.chart .hit:hover .tip{display:inline}
.chart .box{fill:var(--card);stroke:var(--line)}
.chart .rule{stroke:var(--c6);stroke-dasharray:2 3}
""" + "".join(f".chart .s{i}{{stroke:var(--c{i})}}.chart .f{i}{{fill:var(--c{i})}}\n" for i in range(1, 7))

LEVELS = 20


def _ramp(theme: dict[str, str]) -> dict[str, str]:
    """Return opaque shades from the card colour to the first colour. Opaque cells can overlap slightly, which hides seams."""

    def mix(share: float) -> str:
        ends = [(int(theme["card"][i : i + 2], 16), int(theme["c1"][i : i + 2], 16)) for i in (1, 3, 5)]
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in ends)

    return {f"h{i}": mix(0.07 + 0.93 * i / (LEVELS - 1)) for i in range(LEVELS)}


LIGHT |= _ramp(LIGHT)
DARK |= _ramp(DARK)
STYLE += "".join(f".chart .h{i}{{fill:var(--h{i})}}\n" for i in range(LEVELS))

LETTER = 6.8  # estimated (upper) mean width of a letter at 12 px, for layout without font metrics


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
    return powers[:: max(1, math.ceil(len(powers) / max(count, 1)))]


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


def tick_words(ticks: Sequence[float]) -> list[str]:
    """Format ticks with the same number of decimals: `1.5, 2.0`, not `1.5, 2`."""
    words = [compact(tick) for tick in ticks]
    if any(mark in word for word in words for mark in "ekMGT,"):
        return words
    places = max((len(word.partition(".")[2]) for word in words), default=0)
    return [f"{tick:.{places}f}" if tick else "0" for tick in ticks]


def number(x: float) -> str:
    """Format a coordinate with at most one decimal."""
    text = f"{x:.1f}"
    return text.removesuffix(".0")


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    middle = "" if anchor == "start" else f' text-anchor="{anchor}"'
    kind = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{middle}{kind}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, *, radius: int = 0, title: str = "") -> str:
    corner = f' rx="{radius}"' if radius else ""
    tag = f'<rect class="{style}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{corner}'
    return f"{tag}><title>{escape(title)}</title></rect>" if title else f"{tag}/>"


def across(x: float, y: float, to: float, style: str) -> str:
    """A horizontal line."""
    return f'<path class="{style}" d="M{number(x)} {number(y)}H{number(to)}"/>'


def wrap(parts: Sequence[str], width: float, height: float, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {number(width)} {number(height)}" '
        f'role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def standalone(chart: str, title: str) -> str:
    """Return a chart as a standalone SVG file with a title, and with CSS variables replaced for viewers that lack them."""

    def fill_in(css: str, theme: dict[str, str]) -> str:
        return re.sub(r"var\(--(\w+)\)", lambda m: theme[m[1]], css)

    css = STYLE + ".sheet{fill:var(--card)}.title{font-size:16px}"
    style = f"{fill_in(css, LIGHT)}@media(prefers-color-scheme:dark){{{fill_in(css, DARK)}}}"
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', chart)
    assert found is not None, "a chart begins with its size"
    width, height = float(found[1]) + 40, float(found[2]) + 72
    size = f'width="{number(width)}" height="{number(height)}" viewBox="-20 -52 {number(width)} {number(height)}"'
    sheet = rect(-20, -52, width, height, "sheet") + text(0, -20, title, style="title strong")
    opened = chart.replace(found[0], size, 1)
    return re.sub(r"(<svg[^>]*>)", lambda m: f"{m[1]}<style>{style}</style>{sheet}", opened, count=1) + "\n"
