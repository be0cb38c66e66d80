"""docs/scale-tables.md has the tables that `scripts/roofline.py` makes, with its headers and the values that need no compilation."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnet.plan import chips, tables
from linnet.plan.formatting import markdown
from scripts.roofline import CHIPS, serving_plans

PAGE = (Path(__file__).parents[2] / "docs" / "scale-tables.md").read_text()


def test_page_has_the_published_chips() -> None:
    assert tables.chips_table() in PAGE


def test_scaling_tables_have_the_header_of_the_generator() -> None:
    header = markdown(tables.HEADER, []).splitlines()[0]
    assert PAGE.count(header) == 4 * len(tables.PRESETS)  # weak and strong, on two chips


@pytest.mark.parametrize("chip", CHIPS)
def test_session_tables_are_current(chip: str) -> None:
    served = serving_plans()
    assert tables.sessions_table(served, chips.get(chip)) in PAGE
    assert tables.replicas_table(served, chips.get(chip)) in PAGE
