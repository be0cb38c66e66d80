"""One tiny run and one server for it, shared by the tests that only send requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import serving, train_tiny


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def server(tiny_run: Path) -> Iterator[str]:
    with serving(tiny_run) as (address, _):
        yield address
