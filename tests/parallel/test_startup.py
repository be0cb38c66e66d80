"""JAX startup as a user has it: without the compilation cache that the tests set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = "JAX_COMPILATION_CACHE_DIR"
PROGRAM = """
import jax
from linnet.parallel.cluster import init_jax
{before}
init_jax()
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", "linnet/compiled"), ("jax.config.update('jax_compilation_cache_dir', 'chosen')", "chosen")],
    ids=["default", "chosen by the caller"],
)
def test_init_jax_sets_the_compilation_cache(before: str, expected: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != CACHE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (str(tmp_path / expected) if not before else expected)
