"""Every family is tried alike: the toy family is registered as any other, and each subject is trained once for all modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import subjects

import linnet.cli.flags  # noqa: F401  # it lists the families when it is imported, and must not list the toy
from linnet.models import registry
from linnet.runs.folder import RunFolder

TRAINED: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def toy_family() -> Iterator[None]:
    """Add a fourth family by one entry of the registry."""
    registry.FAMILIES["toy"] = subjects.TOY
    yield
    del registry.FAMILIES["toy"]


PARAMS = [pytest.param(name, marks=[pytest.mark.slow] if name == "vq-moe" else []) for name in subjects.NAMES]
"""`vq` with experts is tested by `make test-slow`: its parts are those of `vq` and `moe`, and it takes longest to compile."""


@pytest.fixture(scope="module", params=PARAMS)
def subject(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the subjects' data is."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def uninterrupted(subject: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run."""
    from linnet.train.loop import train

    if subject not in TRAINED:
        run = tmp_path_factory.mktemp(f"whole-{subject}") / "run"
        assert train(subjects.config(subject, folder), RunFolder(run), quiet=True).finished
        TRAINED[subject] = run
    return TRAINED[subject]
