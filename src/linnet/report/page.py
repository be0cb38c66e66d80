"""HTML building blocks of the report: the page with inline CSS, sections, cards and tables. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from linnet.report.plots import Draw
from linnet.report.svg import DARK, LIGHT, STYLE

UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
SECURITY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, sections: Sequence[str]) -> str:
    """Return a complete page. Its Content-Security-Policy blocks loading and scripts, as a second defence after escaping."""
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{clean(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(SECURITY)}">'
        f"<style>{_style()}</style></head>\n<body><main>\n{chr(10).join(sections)}\n"
        "<footer>Written by <code>linnet report</code>. This page is complete in itself and asks nothing of any server."
        "</footer></main></body></html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # JSON may contain lone surrogates, UTF-8 may not


def _style() -> str:
    def variables(theme: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{value};" for name, value in theme.items()) + "}"

    dark = f"@media screen and (prefers-color-scheme:dark){{{variables(DARK)}}}\n"
    page = resources.files("linnet.report").joinpath("report.css").read_text(encoding="utf-8")
    return variables(LIGHT) + dark + STYLE + page


def section(title: str, *parts: str, lead: str = "") -> str:
    words = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{words}{''.join(parts)}</section>"


def none(words: str) -> str:
    return f'<p class="none">{escape(words)}</p>'


def card(title: str, body: str) -> str:
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<figure class="card">{heading}{body}</figure>'


def two_widths(draw: Draw, height: float, wide: float = 1040) -> str:
    """Draw a chart twice, so that its text is legible on a desktop and on a phone; empty if there is no chart."""
    large, small = draw(wide, height), draw(360, min(height, 260.0))
    return f'<div class="wide">{large}</div><div class="narrow">{small}</div>' if large and small else ""


def half(draw: Draw) -> str:
    return two_widths(draw, 230, wide=480)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Return an HTML table. Cells are HTML: the caller must escape them."""
    right = set(numeric)
    style = [' class="num"' if i in right else "" for i in range(len(head))]
    top = "".join(f"<th{style[i]}>{escape(name)}</th>" for i, name in enumerate(head))
    body = "".join("<tr>" + "".join(f"<td{style[i]}>{c}</td>" for i, c in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(words(value))}</td></tr>" for name, value in pairs)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(words, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def clean(text: str) -> str:
    return escape(UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", text))
