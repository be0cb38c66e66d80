"""The lock installs into a fresh environment with old and new pips, and the built wheel works there by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST_PIP = "23.2.1"
"""The pip that comes with Python 3.11 and 3.12."""
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**OUTSIDE, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def make_environment(python: str, folder: Path, pip: str) -> Path:
    """A new environment's Python, with the given release of pip (empty: the newest)."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    wanted = f"pip=={pip}" if pip else "pip"
    command = [inside, "-m", "pip", "install", "--quiet", "--upgrade", wanted]
    done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, check=False)
    if done.returncode and not IN_CI:
        pytest.skip(f"no package index is reachable here ({done.stderr.strip().splitlines()[-1:]})")
    assert done.returncode == 0, done.stderr
    return inside


def newer_release(folder: Path) -> Path:
    """A folder with a release of `etils` that is newer than the lock's, as the index has one after some weeks."""
    folder.mkdir()
    info = "etils-99.0.dist-info"
    with zipfile.ZipFile(folder / "etils-99.0-py3-none-any.whl", "w") as wheel:
        extras = "".join(f"Provides-Extra: {name}\n" for name in ("epath", "epy"))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: etils\nVersion: 99.0\n{extras}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def install_lock(python: Path, folder: Path) -> str:
    newer = newer_release(folder / "newer")
    printed = run(python, ROOT / "scripts" / "install_lock.py", ROOT / "requirements.lock", PIP_FIND_LINKS=str(newer))
    run(python, "-m", "pip", "check")
    return printed


@pytest.mark.slow
def test_lock_and_wheel_install_into_a_fresh_environment(tmp_path: Path) -> None:
    python = make_environment(sys.executable, tmp_path / "venv", OLDEST_PIP)
    assert "packages in" in install_lock(python, tmp_path)
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("linnet_lm-*.whl")
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    run(python, "-m", "pip", "check")
    away = tmp_path / "away"
    away.mkdir()
    linnet = python.with_name("linnet")
    assert run(linnet, "--version", cwd=away).startswith("linnet ")
    assert "reproduces the references" in run(linnet, "verify", cwd=away, XLA_FLAGS="")
    assert "runs/quickstart" in run(linnet, "quickstart", "--minutes", "0.01", cwd=away)
    assert (away / "runs" / "quickstart" / "report.html").is_file()


def runs(name: str) -> bool:
    """A version manager's shim may be on the PATH without the version that it stands for."""
    return bool(shutil.which(name)) and subprocess.run([name, "--version"], capture_output=True).returncode == 0


PYTHONS = [name for name in ("python3.11", "python3.12", "python3.13") if runs(name)]


@pytest.mark.trial
@pytest.mark.parametrize("pip", [OLDEST_PIP, ""], ids=["oldest pip", "newest pip"])
@pytest.mark.parametrize("name", PYTHONS)
def test_lock_installs_with_every_python_and_pip(name: str, pip: str, tmp_path: Path) -> None:
    python = make_environment(name, tmp_path / "venv", pip)
    install_lock(python, tmp_path)
    run(python, "-c", "import linnet.cli.dispatch, jax; jax.numpy.ones(3).sum()", PYTHONPATH=str(ROOT / "src"))
