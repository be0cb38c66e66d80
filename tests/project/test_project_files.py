"""The files around the package (workflows, hooks, container, citation) agree with the Makefile and pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import linnet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCKS = [ROOT / "requirements.lock", ROOT / ".github" / "docs.lock", ROOT / ".github" / "sbom.lock"]
YAML_FILES = [
    *WORKFLOWS,
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "compose.yaml",
    ROOT / "mkdocs.yml",
    ROOT / "CITATION.cff",
]
TEXTS = [
    *YAML_FILES,
    ROOT / "Dockerfile",
    ROOT / ".dockerignore",
    ROOT / "Makefile",
    ROOT / "SECURITY.md",
    ROOT / "CODE_OF_CONDUCT.md",
    ROOT / ".github" / "pull_request_template.md",
]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def workflow(name: str) -> dict[str, Any]:
    return read_yaml(ROOT / ".github" / "workflows" / f"{name}.yml")


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read_yaml(path)["jobs"].values() for step in job.get("steps", [])]


def commands(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def declared_versions() -> list[str]:
    prefix = "Programming Language :: Python :: "
    return [line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(prefix)]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(read_yaml(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_existing_make_targets(path: Path) -> None:
    called = [word for run in commands(path) for line in re.findall(r"\bmake ([a-z -]+)", run) for word in line.split()]
    assert called
    assert set(called) <= make_targets()


def test_each_workflow_runs_its_part() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "release"}
    assert {"make lint", "make types", "make docs", "make test"} <= set(
        commands(ROOT / ".github" / "workflows" / "ci.yml")
    )
    assert "make trials" in commands(ROOT / ".github" / "workflows" / "nightly.yml")
    assert workflow("release")["jobs"]["build"]["needs"] == ["ci"]
    assert workflow("release")["jobs"]["publish"]["needs"] == ["build"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_the_least_permissions(path: Path) -> None:
    content = read_yaml(path)
    assert content["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_full_versions(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", name)] == []


def test_ci_tests_the_declared_python_versions() -> None:
    matrix = workflow("ci")["jobs"]["tests"]["strategy"]["matrix"]["python-version"]
    assert matrix == declared_versions()
    assert PROJECT["requires-python"] == f">={matrix[0]}"
    image = re.search(r"^FROM python:(\d+\.\d+)-slim$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    assert image[1] in matrix


def test_versions_agree() -> None:
    assert read_yaml(ROOT / "CITATION.cff")["version"] == PROJECT["version"] == linnet.__version__
    assert read_yaml(ROOT / "CITATION.cff")["license"] == PROJECT["license"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == linnet.__version__


def test_dockerfile_copies_files_that_exist_and_are_sent_to_the_builder() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(allowed)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert text.index("\nUSER ") < text.index('\nENTRYPOINT ["linnet"]')


def test_compose_serves_on_loopback_with_keys() -> None:
    service = read_yaml(ROOT / "compose.yaml")["services"]["linnet"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["command"][0] == "serve"
    assert ":?" in service["environment"]["LINNET_API_KEYS"]  # compose stops with a message where it is not set


def test_hooks_are_local_and_run_locked_tools() -> None:
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].split() for hook in repository["hooks"]]
    tools = {entry[0].removeprefix(".venv/bin/") for entry in entries if entry[0].startswith(".venv/bin/")}
    assert tools == {"ruff", "basedpyright"}
    locked = LOCKS[0].read_text()
    assert [tool for tool in tools if f"\n{tool}==" not in locked] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_registry_host(path: Path) -> None:
    text = path.read_text()
    hosts = re.findall(r"https?://([^/:\s'\")]+)", text)
    assert [host for host in hosts if host != "127.0.0.1"] == []
    assert re.search(r"(?<!no-emit-)index-url|find-links|trusted-host", text) is None


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_locks_name_no_index(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert re.search(r"^-", text, re.MULTILINE) is None
    assert re.search(r"^[^\s#]+(?!.*\\$).*$", text, re.MULTILINE) is None  # a pin is followed by its hashes


def test_modules_left_out_of_the_fast_tests_exist() -> None:
    listed = (ROOT / "tests" / "compiling_modules.txt").read_text().splitlines()[1:]
    assert listed == sorted(set(listed))
    assert [name for name in listed if not (ROOT / "tests" / name).is_file()] == []
