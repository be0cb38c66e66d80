"""One tiny run and one server for it, shared by the tests that only send requests, and runs that generate no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from image_runs import PAINTER, PRIOR, write_untrained
from server_process import serving, train_tiny


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def server(tiny_run: Path) -> Iterator[str]:
    with serving(tiny_run) as (address, _):
        yield address


@pytest.fixture(scope="session")
def image_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pixel model, a painter and a prior, by the names that the documentation uses."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "emoji": Path(__file__).parents[1] / "goldens" / "runs_0_1" / "pixels",
        "emoji-imagine": write_untrained(folder / "emoji-imagine", PAINTER),
        "prior-emoji": write_untrained(folder / "prior-emoji", PRIOR),
    }
