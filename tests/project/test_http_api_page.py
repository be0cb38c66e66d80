"""docs/http-api.md and docs/serve.md against the server's OpenAPI document, error codes, metrics and flags."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from linnet.cli.serve import Flags
from linnet.config import presets
from linnet.models import registry
from linnet.serve.http.app import ENDPOINTS
from linnet.serve.http.openapi import ERRORS, describe

ROOT = Path(__file__).parent.parent.parent
API = (ROOT / "docs" / "http-api.md").read_text()
SERVE = (ROOT / "docs" / "serve.md").read_text()
SESSIONS = (ROOT / "docs" / "sessions.md").read_text()
DOCUMENT = describe(ENDPOINTS, "0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
SECTIONS = {
    "CompletionRequest": ("Sampling fields", "Text fields", "`POST /v1/completions`"),
    "ChatRequest": ("Sampling fields", "Text fields", "`POST /v1/chat/completions`"),
    "ImageRequest": ("Sampling fields", "`POST /v1/images/generations`"),
    "PriorRequest": ("`POST /v1/priors/sample`",),
    "TokenizeRequest": ("Tokenize and detokenize",),
    "DetokenizeRequest": ("Tokenize and detokenize",),
    "SessionRequest": ("Sessions",),
}
"""The sections that together have all fields of a request."""
MAX_STATED = 1_000_000
"""Larger bounds are those of a type, not of a setting."""


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", API, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def rows(text: str) -> dict[str, str]:
    """Return the table row of each field that the first cell of a row names."""
    found = re.findall(r"^\| (`[^|]*) \|(.*)$", text, re.MULTILINE)
    # Reversed, so that the first table wins: requests stand before responses.
    return {name: rest for names, rest in reversed(found) for name in re.findall(r"`([^`]+)`", names)}


@pytest.mark.parametrize(("path", "method"), [(path, m.upper()) for path, ms in DOCUMENT["paths"].items() for m in ms])
def test_every_endpoint_is_on_the_page(path: str, method: str) -> None:
    assert f"`{method} {path}`" in API


def test_page_has_no_other_endpoint() -> None:
    shown = set(re.findall(r"`(GET|POST|PUT|DELETE) (/[^` ]*)`", API))
    assert shown == {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_every_request_has_its_sections() -> None:
    assert set(SECTIONS) == {one.takes.__name__ for one in ENDPOINTS if isinstance(one.takes, type)}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_request_field_is_in_its_section(name: str) -> None:
    text = "".join(map(section, SECTIONS[name]))
    missing = [field for field in SCHEMAS[name]["properties"] if f"`{field}`" not in text]
    assert not missing


@pytest.mark.parametrize("name", [name for name in SECTIONS if "fields" in SECTIONS[name][0] or name == "PriorRequest"])
def test_tables_have_every_field_and_its_bounds(name: str) -> None:
    table = rows("".join(map(section, SECTIONS[name])))
    for field, schema in SCHEMAS[name]["properties"].items():
        assert field in table, field
        for bound in bounds(schema):
            if abs(bound) <= MAX_STATED:
                assert re.search(rf"(?<![\d.]){re.escape(f'{bound:g}')}(?![\d.])", table[field]), (field, bound)


def bounds(schema: Any) -> set[float]:
    """Return the numbers that limit a field of the schema or of its alternatives."""
    if isinstance(schema, list):
        return set().union(*map(bounds, schema))
    if not isinstance(schema, dict):
        return set()
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "maxLength")
    own = {float(value) for name, value in schema.items() if name in limits}
    return own.union(*(bounds(schema[name]) for name in ("anyOf", "additionalProperties") if name in schema))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_field_of_every_schema_is_on_the_page(name: str) -> None:
    words = set(re.findall(r"[\w]+", " ".join(re.findall(r"`([^`\n]+)`", API))))
    assert set(SCHEMAS[name].get("properties", {})) <= words


def test_every_error_status_and_code_is_on_the_page() -> None:
    table = re.findall(r"^\| (\d{3}) \| `\w+` \| (.*?) \| ", section("Errors"), re.MULTILINE)
    assert {int(status) for status, _ in table} == set(ERRORS)
    shown = {code for _, cell in table for code in re.findall(r"`(\w+)`", cell)}
    sources = "".join(one.read_text() for one in (ROOT / "src" / "linnet" / "serve").rglob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', sources)) | set(re.findall(r'too_many\(.*?, "(\w+)", ', sources))
    assert shown == codes


def test_serve_page_has_every_flag_with_its_default() -> None:
    table = rows(SERVE)
    for field in dataclasses.fields(Flags):
        if field.name == "runs":
            continue
        row = table[f"--{field.name.replace('_', '-')}"]
        if isinstance(field.default, int | float):
            assert f"{field.default:g}" in row, field.name
        elif field.default:
            assert str(field.default) in row, field.name


def test_serve_page_has_every_metric() -> None:
    sources = "".join(
        (ROOT / "src" / "linnet" / "serve" / name).read_text() for name in ("http/metrics.py", "replicas/metrics.py")
    )
    names = set(re.findall(r'"(linnet_\w+)"', sources)) - {"linnet_http_requests"} | {"linnet_http_requests_total"}
    shown = set(re.findall(r"`(linnet_\w+)`", SERVE))
    missing = {name for name in names if not {name, f"{name}_total"} & shown}
    assert not missing


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (row, re.findall(r"`([\w-]+)`", row[0]))
        for row in re.findall(r"^\| (`.*?`.*?) \| (.*?) \| (.*?) \| (.*?) \|$", SESSIONS, re.MULTILINE)
        if "MB" in row[1]
    ],
)
def test_session_sizes(cells: tuple[str, str, str, str], names: list[str]) -> None:
    stated = [float(cell.replace(",", "").partition(" MB")[0].lstrip("(")) for cell in cells[1:]]
    for name in (name for name in names if name in presets.PRESETS):
        cfg: Any = presets.get(name)
        decoder = registry.tokens(cfg.family).decoder
        lengths = [1_000, 8_000 if cfg.model.context else 1_000_000]
        slot = jax.eval_shape(lambda cfg=cfg, decoder=decoder: decoder.init_slots(cfg.model, 1))
        sizes = [n_bytes(slot), *(n_bytes(decoder.abstract_state(cfg.model, n)) for n in lengths)]
        assert [size / 1e6 for size in sizes] == pytest.approx(stated, rel=0.01), name


def n_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
