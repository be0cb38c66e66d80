"""URLs are rejected by every flag that may be a path, of every command, before anything is read or written."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro
from cli_commands import COMMANDS, flags_of

import linnet.cli
from linnet.cli.dispatch import main
from linnet.cli.parse import parse as linnet_parse
from linnet.config import codec, presets
from linnet.config.schema import DataConfig, PairsConfig, RunConfig
from linnet.core.errors import UserError
from linnet.core.local_path import check_local, is_free_text, is_remote
from linnet.data import load_dataset
from linnet.data.embeddings import open_pairs
from linnet.runs.folder import RunFolder
from linnet.tokenizers.load import open_tokenizer

URL = "s3://bucket/x"
CLI = Path(linnet.cli.__file__).parent


def takes_strings(hint: Any) -> bool:
    """Whether a value of this type is, or may contain, a path or a string that is not free text."""
    if is_free_text(hint) or typing.get_origin(hint) is Literal:
        return False
    return hint in (str, Path) or any(takes_strings(part) for part in typing.get_args(hint) if part is not Ellipsis)


def is_positional(hint: Any) -> bool:
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def n_values(hint: Any) -> int:
    """2 for a flag that takes a pair."""
    pairs = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is tuple]
    return 2 if pairs and Ellipsis not in typing.get_args(pairs[0]) else 1


def placeholder(hint: Any) -> str:
    while hasattr(hint, "__metadata__"):
        hint = typing.get_args(hint)[0]
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Literal else "1"


def command_lines() -> Iterator[tuple[list[str], str]]:
    """For each path flag of each command: a command line with a URL for that flag, and the name of the flag."""
    for words, name in COMMANDS.items():
        cls = flags_of(name)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hints = {n: h for n, h in typing.get_type_hints(cls, include_extras=True).items() if n in fields}
        config = presets.get(words[1]) if "config" in hints else None
        required = {n: placeholder(h) for n, h in hints.items() if is_required(fields[n]) and n != "config"}
        for flag, hint in hints.items():
            if flag == "config" or (config is not None and flag == "from_") or not takes_strings(hint):
                continue
            shown = flag.upper() if is_positional(hint) else flag_name(flag, hint)
            yield [*words, *arguments(hints, required, flag, hint)], shown
        for flag in config_flags(config):
            # Settings that are rejected alone, for a reason of their own.
            beside = ["--data.images", "x"] if flag in ("--data.texts", "--data.metadata", "--data.encodings") else []
            beside += ["--data.texts", "x"] if flag == "--data.encodings" else []
            yield [*words, *arguments(hints, required, "", None), *beside, flag, URL], flag


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def arguments(hints: dict[str, Any], required: dict[str, str], flag: str, hint: Any) -> list[str]:
    placed = [n for n in hints if is_positional(hints[n]) and (n in required or n == flag)]
    line = [URL if n == flag else required[n] for n in placed]
    for n in required:
        if not is_positional(hints[n]) and n != flag:
            line += [f"--{n.replace('_', '-')}", required[n]]
    if flag and not is_positional(hint):
        line += [flag_name(flag, hint), *[URL] * n_values(hint)]
    return line


def flag_name(field: str, hint: Any) -> str:
    """`--from` for a field `from_`, `--data.source` for `data_source`: the name that the annotation gives, or else the field's."""
    given = [mark.name for mark in getattr(hint, "__metadata__", ()) if getattr(mark, "name", None)]
    return f"--{given[0] if given else field.replace('_', '-')}"


def config_flags(config: RunConfig | None) -> Iterator[str]:
    """The string settings of a run, such as `--data.source`. Those with a form of their own are checked for that first."""
    for field in dataclasses.fields(config) if config is not None else ():
        value = getattr(config, field.name)
        settings = {f"{field.name}.{n}": h for n, h in hints_of(value)} if dataclasses.is_dataclass(value) else {}
        own = typing.get_type_hints(RunConfig)[field.name]
        for name, hint in settings.items() or {field.name: own}.items():
            if takes_strings(hint) and name not in ("mesh", "family", "lora.targets"):
                yield f"--{name.replace('_', '-')}"


def hints_of(value: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(type(value), include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(value)]


CASES = list(command_lines())


def test_no_command_is_missing() -> None:
    """Every dataclass that is parsed from a command line is in `COMMANDS`."""
    parsed: set[str] = set()
    for path in CLI.glob("*.py"):
        module = importlib.import_module(f"linnet.cli.{path.stem}")
        if getattr(module, "parse", None) is not linnet_parse:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "parse":
                assert isinstance(node.args[0], ast.Name)
                cls = getattr(module, node.args[0].id)
                parsed |= {f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"}
    assert parsed == set(COMMANDS.values())
    for call, only in (("tyro.cli", {"flags"}), ("parse_flags(", {"flags", "parse"})):
        assert {path.stem for path in CLI.glob("*.py") if call in path.read_text()} == only


def test_path_flag_list_is_complete() -> None:
    shown = {(line[0], flag) for line, flag in CASES}
    known = {
        "train": ("--out", "--data.source", "--data.validation-files", "--data.test-files", "--data.condition"),
        "serve": ("RUNS", "--sessions", "--keys-file", "--batch"),
        "import": ("FILE", "--out", "--source", "--tokenizer", "--settings"),
        "eval": ("RUN", "--source", "--data.source"),
        "data": ("SOURCE", "--out", "--tokenizer", "--from", "--metadata", "WHAT", "FOLDER"),
        "sample": ("RUN", "--prompt-file", "--out", "--complete", "--embedding"),
    }
    assert {(command, flag) for command, flags in known.items() for flag in flags} <= shown
    assert ("train", "--data.images") in shown
    assert ("sample", "--prompt") not in shown


@pytest.mark.parametrize(("line", "flag"), CASES, ids=[" ".join(line) for line, _ in CASES])
def test_url_is_rejected_by_name(
    line: list[str],
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(line)
    output = capsys.readouterr().err
    assert ended.value.code == 2, output
    assert f"{flag} is {URL!r}, but it must be a path on this machine" in output.replace("[0]", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        ["train", "s3://bucket/run"],
        ["train", "--config", "s3://bucket/config.json"],
        ["train", "quickstart", "--out=gs://bucket/run"],
        ["train", "--from", "s3://bucket/run", "--out", "run"],
        ["plan", "hf://org/run"],
        ["serve", "model=s3://bucket/run"],
        ["eval", "S3://bucket/run"],
        ["export", "run", "--out", "abfss://container@account/run.safetensors"],
    ],
    ids=" ".join,
)
def test_other_spellings(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(line)
    output = capsys.readouterr().err
    assert ended.value.code == 2, output
    assert "a path on this machine" in output
    assert list(tmp_path.iterdir()) == []


def test_run_whose_config_names_a_url_is_rejected_when_its_data_is_opened(tmp_path: Path, capsys: Any) -> None:
    cfg = presets.get("quickstart")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source=URL))
    codec.save(cfg, tmp_path / "config.json")
    with pytest.raises(SystemExit):
        main(["data", "show", str(tmp_path)])
    assert f"data.source is {URL!r}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "config.json"), "--out", str(tmp_path / "run")])
    assert f"data.source is {URL!r}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_library_rejects_urls_too(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 1000)
    with pytest.raises(UserError, match="data.validation_files"):
        load_dataset(DataConfig(source=str(text), validation_files=(URL,)), 0)
    with pytest.raises(UserError, match="data.texts"):
        open_pairs(PairsConfig(images=str(tmp_path), texts=URL), 0)
    with pytest.raises(UserError, match="data.source"):
        open_pairs(PairsConfig(source=URL), 0)
    with pytest.raises(UserError, match="tokenizer"):
        open_tokenizer(URL)
    with pytest.raises(UserError, match="run is 's3://bucket/x'"):
        RunFolder(Path(URL))


def test_paths_that_are_not_urls(tmp_path: Path) -> None:
    for value in ("a/b", "C:/x", "hf:owner/name", "/s3://x", "bytes", "", "a b://c", json.dumps("x")):
        assert not is_remote(value), value
    assert not is_remote(tmp_path / "s3:" / "bucket")
    with pytest.raises(UserError, match=r"'file:///tmp/x'.*without file://"):
        check_local("--out", Path("file:///tmp/x"))
    with pytest.raises(UserError, match="hf:OWNER/NAME"):
        check_local("--out", "hf://datasets/x")
