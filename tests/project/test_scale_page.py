"""docs/scale-tables.md has the tables that `linnet.plan.tables` makes, with its headers and the values that need no compilation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from linnet.config import presets
from linnet.plan import chips, tables
from linnet.plan.formatting import markdown
from linnet.plan.serving import plan_serving

PAGE = (Path(__file__).parents[2] / "docs" / "scale-tables.md").read_text()
SERVED = [
    ("enwik8", "bfloat16", ""),
    ("pg19", "bfloat16", ""),
    ("imagenet64", "bfloat16", ""),
    ("grok-1", "int8", "model=8"),
]


def test_page_has_the_published_chips() -> None:
    assert tables.chips_table() in PAGE


def test_scaling_tables_have_the_header_of_the_generator() -> None:
    header = markdown(tables.HEADER, []).splitlines()[0]
    assert PAGE.count(header) == 4 * len(tables.PRESETS)  # weak and strong, on two chips


@pytest.mark.parametrize("chip", ["tpu-v5p", "h100"])
def test_session_tables_are_current(chip: str) -> None:
    served = [
        (name, plan_serving(dataclasses.replace(presets.get(name), mesh=mesh), weights))
        for name, weights, mesh in SERVED
    ]
    assert tables.sessions_table(served, chips.get(chip)) in PAGE
    assert tables.replicas_table(served, chips.get(chip)) in PAGE
