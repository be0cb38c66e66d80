"""The Jinja2 templates of the report, and their environment. Everything inserted into a template is escaped."""

from __future__ import annotations

import functools
import re
from typing import Any

import jinja2

_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def printable(value: Any) -> Any:
    """Replace control characters in plain text, which HTML forbids. Other values, and `Markup`, are returned as they are."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


@functools.cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("linnet.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


def render_template(name: str, **values: Any) -> str:
    return environment().get_template(name).render(values)
