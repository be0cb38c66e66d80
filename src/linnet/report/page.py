"""The parts of a report page as data. `templates/page.html` turns them into HTML, escaping every text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

from linnet.report.svg import DARK, LIGHT, VARIABLES, Chart
from linnet.report.templates import render_template

NARROW, WIDE, HALF = 360.0, 1040.0, 480.0
"""Widths of charts in pixels: on a phone, across the page, and in one of two columns."""
GOOD = frozenset({"finished"})
WARN = frozenset({"interrupted", "skipped", "alarm", "restart_codes", "failed", "stopped"})


def tone(event: str) -> str:
    """Return the CSS class of an event's colour."""
    return "good" if event in GOOD else "warn" if event in WARN else ""


@dataclasses.dataclass(frozen=True)
class Notice:
    kind: ClassVar[str] = "notice"
    text: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """A chart in a card. It is drawn twice, so that its text is legible on a desktop and on a phone."""

    kind: ClassVar[str] = "figure"
    title: str
    wide: Chart
    narrow: Chart
    text: str = ""


def figure(
    title: str, draw: Callable[..., Chart], *, width: float = WIDE, height: float | None = None, text: str = ""
) -> Figure:
    """Draw a chart in both widths. `draw` takes `width`, and `height` unless its data determine that."""
    if height is None:
        return Figure(title, draw(width=width), draw(width=NARROW), text)
    return Figure(title, draw(width=width, height=height), draw(width=NARROW, height=min(height, 260.0)), text)


def half_figure(title: str, draw: Callable[..., Chart], *, height: float | None = 230.0, text: str = "") -> Figure:
    return figure(title, draw, width=HALF, height=height, text=text)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Figures in two columns, or in one on a phone."""

    kind: ClassVar[str] = "columns"
    figures: Sequence[Figure]


def columns(figures: Iterable[Figure | None]) -> Columns | None:
    shown = [one for one in figures if one is not None]
    return Columns(shown) if shown else None


@dataclasses.dataclass(frozen=True)
class Cell:
    text: str
    style: str


@dataclasses.dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numeric: Collection[int]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Names and values in a card."""

    kind: ClassVar[str] = "facts"
    pairs: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Fold:
    """A part that opens with a click; its content is a text, a PNG image as base64, or facts."""

    title: str
    note: str = ""
    is_open: bool = False
    text: str = ""
    image: str = ""
    pairs: Sequence[tuple[str, str]] = ()


@dataclasses.dataclass(frozen=True)
class Folds:
    kind: ClassVar[str] = "folds"
    folds: Sequence[Fold]


Block = Notice | Figure | Columns | Table | Facts | Folds


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    lead: str = ""


def section(title: str, *blocks: Block | None, lead: str = "") -> Section:
    return Section(title, [block for block in blocks if block is not None], lead)


@dataclasses.dataclass(frozen=True)
class Tile:
    title: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    name: str
    about: Sequence[str]
    status: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]


def render_page(page: Page) -> str:
    text = render_template("page.html", page=page, tone=tone, theme=VARIABLES, light=LIGHT, dark=DARK)
    return text.encode("utf-8", "replace").decode("utf-8")  # JSON may contain lone surrogates, UTF-8 may not


def format_cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def format_value(value: Any) -> str:
    """Format a value of a JSON file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
