"""The package declares what it imports, bounds what it uses privately, and refers to nothing outside the repository."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from linnet.verify.golden import GOLDENS, installed_goldens

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED_BY_EXTRAS = {"datasets": "datasets", "wandb": "wandb", "open_clip": "open-clip-torch", "torch": "torch"}
"""Modules that the lock does not install, with their distributions: imported only where the user asks for them."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> dict[str, str]:
    """Distribution -> its requirement."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {normalized(re.split(r"[\[<>=!~; ]", line)[0]): line for line in lines}


def imported(folder: str) -> set[str]:
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    files = list((ROOT / folder).rglob("*.py"))
    local = {path.parent.name if path.name == "__init__.py" else path.stem for path in files} | {"linnet"}
    if folder != "src":  # they are not installed, so the package may not import them
        local |= {"benchmarks", "scripts"}
    return found - set(sys.stdlib_module_names) - local


@functools.cache
def installed() -> dict[str, set[str]]:
    """Module -> the distributions that bring it. Reading all of their metadata takes half a second."""
    return {name: set(found) for name, found in metadata.packages_distributions().items()}


def distributions(module: str) -> set[str]:
    if module in INSTALLED_BY_EXTRAS:
        return {INSTALLED_BY_EXTRAS[module]}
    return {normalized(name) for name in installed()[module]}


@pytest.mark.parametrize("folder", ["src", "benchmarks", "tests", "scripts", "examples"])
def test_every_import_is_declared(folder: str) -> None:
    known = declared(*(EXTRAS if folder != "src" else [name for name in EXTRAS if name != "dev"]))
    undeclared = sorted(module for module in imported(folder) if not distributions(module) & known.keys())
    assert undeclared == []


@pytest.mark.parametrize("name", ["jax", "orbax-checkpoint", "uvicorn"])
def test_private_interfaces_have_an_upper_bound(name: str) -> None:
    assert "<" in declared()[name]


def test_lock_satisfies_the_declared_bounds() -> None:
    from packaging.requirements import Requirement

    lock = dict(
        re.findall(
            r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ \\]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
        )
    )
    versions = {normalized(name): version for name, version in lock.items()}
    for name, line in declared("dev").items():
        assert Requirement(line).specifier.contains(versions[name]), f"{line}: locked at {versions[name]}"


def test_distribution_has_a_free_name_and_keeps_the_command() -> None:
    """`linnet` on PyPI is another project."""
    assert PROJECT["name"] == "linnet-lm"
    assert PROJECT["scripts"] == {"linnet": "linnet.cli:main"}


def test_installed_goldens_are_the_repositorys() -> None:
    originals = {path.name: path for path in (ROOT / "tests" / "goldens").rglob("*") if path.is_file()}
    copies = [path for path in GOLDENS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in installed_goldens()} == {"vq", "grok", "prior"}
    for path in copies:
        assert path.read_bytes() == originals[path.name].read_bytes(), path.name
    assert sum(path.stat().st_size for path in copies) < 2_000_000


def test_nothing_refers_to_files_outside_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    texts = [
        ROOT / name
        for name in listed
        if name.endswith((".py", ".md", ".toml", ".sh", ".mjs")) or name in ("Makefile", ".ci/run")
    ]
    texts = texts or [path for folder in ("src", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
    outside = re.compile(r"\.\./shared|\.\./\.library|[\"']shared[\"'] */|DESIGN\.md|NAMES\.md")
    here = Path(__file__).name
    assert [
        str(path) for path in texts if path.name != here and path.is_file() and outside.search(path.read_text())
    ] == []
