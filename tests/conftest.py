"""What tests share: a compilation cache between workers and runs, for compiling takes most of their time, and a text to train on."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import shape_checks
from compiler_flags import QUICKLY

CACHE = Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

shape_checks.install()  # before any module of the package is imported

COMPILING = Path(__file__).parent / "compiling_modules.txt"

MAPS = Path("/proc/self/maps")
MAX_MAPS = 25_000
"""Every program in memory takes some maps of the process, of which Linux allows 65,530: beyond them the compiler crashes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quickly",
        action="store_true",
        help="without the compiler's optimisations, and without the tests marked `optimized`, which need them",
    )
    parser.addoption("--fast", action="store_true", help=f"without the modules in {COMPILING.name}")
    parser.addoption("--limit", type=float, help="fail a test that takes more CPU-seconds than this")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quickly"):
        os.environ["XLA_FLAGS"] = QUICKLY  # the workers' too: they are started later


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quickly"):
        items[:] = [item for item in items if item.get_closest_marker("optimized") is None]
    if config.getoption("fast"):
        compiling = {COMPILING.parent / line for line in COMPILING.read_text().splitlines() if not line.startswith("#")}
        items[:] = [item for item in items if item.path not in compiling]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Enforce `--limit`. CPU-seconds of the test and of its ended children are counted, because seconds depend on other load."""
    before = sum(os.times()[:4])
    yield
    limit, taken = item.config.getoption("limit"), sum(os.times()[:4]) - before
    if limit is not None and taken > limit:
        pytest.fail(f"took {taken:.0f} CPU-seconds, more than {limit:g}. Fix: make it smaller, or mark it `slow`.")


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """A worker runs a thousand tests: what they compiled is let go in time."""
    yield
    if "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny  # after the settings above: JAX reads them once, when the package first imports it

    return tiny.corpus(tmp_path_factory.mktemp("corpus"))
