"""The public surface is pinned: flags of the commands, the HTTP API, and the Python API.

`tests/goldens/surface/` lists every flag with its type and default, every public Python name with its signature, and holds the
OpenAPI document. An intended change is recorded
with `LINNET_UPDATE_SURFACE=1 .venv/bin/pytest tests/project/test_surface.py`, and its diff is part of the review.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from cli_commands import COMMANDS, flags_of

import linnet
from linnet.api import client_text, text, training
from linnet.cli.dispatch import COMMANDS as DISPATCHED
from linnet.cli.flags import Flag, list_flags
from linnet.config import presets
from linnet.serve.http.app import ENDPOINTS
from linnet.serve.http.openapi import describe

SURFACE = Path(__file__).parent.parent / "goldens" / "surface"
UPDATE = "LINNET_UPDATE_SURFACE"
PRESETS = ("quickstart", "moe-cpu", "prior-emoji")
"""A run has other settings in each family, so `linnet train` is listed for one preset per family."""


def compare(name: str, current: str) -> None:
    file = SURFACE / name
    if os.environ.get(UPDATE):
        file.parent.mkdir(exist_ok=True)
        file.write_text(current)
    pinned = file.read_text()
    diff = "\n".join(difflib.unified_diff(pinned.splitlines(), current.splitlines(), "pinned", "current", lineterm=""))
    assert not diff, (
        f"the public surface changed. If that is intended, run `{UPDATE}=1 .venv/bin/pytest tests/project/test_surface.py`, "
        f"commit {name} and describe the change in CHANGELOG.md.\n{diff}"
    )


def all_flags() -> Iterator[tuple[str, list[Flag]]]:
    for words, name in COMMANDS.items():
        cls, command = flags_of(name), " ".join(words)
        if words[0] == "plan":  # its other flags are the settings of a run, as in `linnet train`
            flags = list_flags(cls, cls(config=presets.get("quickstart")))
            yield "plan PRESET", [flag for flag in flags if flag.path[0] != "config"]
        elif words[0] != "train":
            yield command, list_flags(cls)
    train = flags_of(COMMANDS["train", "quickstart"])
    for preset in PRESETS:
        yield f"train {preset}", list_flags(train, train(config=presets.get(preset)))


def type_name(hint: Any) -> str:
    """Sorted, because equal types share one cached object, whose order is that of the first import."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        return type_name(args[0])
    if origin is Literal:
        return "{" + ",".join(sorted(map(str, args))) + "}"
    if origin in (types.UnionType, typing.Union):
        return " | ".join(sorted(map(type_name, args), key=lambda name: (name == "None", name)))
    if origin is tuple:
        return f"tuple[{', '.join('...' if arg is Ellipsis else type_name(arg) for arg in args)}]"
    return "None" if hint is type(None) else hint.__name__


def default_of(flag: Flag) -> str:
    if flag.default is dataclasses.MISSING:
        return "required"
    return repr(str(flag.default) if isinstance(flag.default, Path) else flag.default)


def test_flags() -> None:
    lines: list[str] = []
    for command, flags in all_flags():
        lines += [f"linnet {command}", *(f"  {f.shown}: {type_name(f.hint)} = {default_of(f)}" for f in flags), ""]
    compare("flags.txt", "\n".join(lines))


def test_http_api() -> None:
    compare("openapi.json", json.dumps(describe(ENDPOINTS, "VERSION"), indent=1, sort_keys=True) + "\n")


def public_members(cls: type[Any]) -> Iterator[str]:
    """The signatures of a class: its constructor, methods, properties and annotated attributes."""
    if cls in (linnet.Client, linnet.AsyncClient):  # objects of the other classes are made by functions and methods
        yield f"  __init__{signature(cls.__init__)}"
    fields = {name: hint for base in reversed(cls.__mro__) for name, hint in own_annotations(base).items()}
    yield from (f"  {name}: {hint}" for name, hint in fields.items() if not name.startswith("_"))
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_") or name in fields or not _is_ours(member):
            continue
        if isinstance(member, property):
            yield f"  {name}: {inspect.signature(member.fget).return_annotation}"  # pyright: ignore[reportArgumentType]
        else:
            kind = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"  {kind}{name}{signature(getattr(member, '__func__', member))}"


def own_annotations(cls: type[Any]) -> dict[str, Any]:
    found = inspect.get_annotations(cls) if cls.__module__.startswith("linnet") else {}
    return {name: getattr(hint, "__forward_arg__", hint) for name, hint in found.items()}


def _is_ours(member: Any) -> bool:
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return inspect.isfunction(member) and member.__module__.startswith("linnet")


def signature(function: Any) -> str:
    """The parameters as they are written. `**options` of a TypedDict are listed with its keys."""
    found = inspect.signature(function)
    parts: list[str] = []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        text = one.name if one.annotation is one.empty else f"{one.name}: {one.annotation}"
        if one.kind is one.VAR_KEYWORD:
            cls = option_class(str(one.annotation).removeprefix("Unpack[").removesuffix("]"))
            hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in cls.__annotations__.items()}
            parts += [f"{name}: {hint} = ..." for name, hint in hints.items()]
        else:
            parts.append(text if one.default is one.empty else f"{text} = {one.default!r}")
    return f"({', '.join(parts)}) -> {found.return_annotation}"


def option_class(name: str) -> Any:
    return getattr(client_text, name, None) or getattr(text, name)


def test_python_api() -> None:
    lines: list[str] = []
    for name in sorted(linnet.__all__):
        one = training.train if name == "train" else getattr(linnet, name)  # the package can be called
        if inspect.isclass(one):
            bases = ", ".join(base.__name__ for base in one.__bases__ if base is not object)
            lines += [f"class {name}({bases})" if bases else f"class {name}", *public_members(one), ""]
        elif callable(one):
            lines += [f"{name}{signature(one)}", ""]
    compare("python.txt", "\n".join(lines))


def test_every_command_is_listed() -> None:
    assert {words[0] for words in COMMANDS} == set(DISPATCHED)


def test_change_fails_and_says_how_to_record_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UPDATE, raising=False)
    pinned = (SURFACE / "flags.txt").read_text()
    with pytest.raises(AssertionError, match=rf"(?s){UPDATE}=1 .*--temperature: float = 0.5"):
        compare("flags.txt", pinned.replace("--temperature: float = 1.0", "--temperature: float = 0.5", 1))


def test_help_does_not_import_jax() -> None:
    """JAX takes most of a second, and --help computes nothing."""
    lines = [list(words) if words[0] not in ("train", "plan") else [words[0]] for words in COMMANDS]
    program = f"""
import contextlib, io, sys
from linnet.cli import main
for line in {lines}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([*line, "--help"])
    assert not {{"jax", "pydantic", "pyarrow", "starlette"}} & set(sys.modules), line
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("command", "flags"), list(all_flags()), ids=lambda x: x if isinstance(x, str) else "")
def test_every_flag_has_help(command: str, flags: list[Flag]) -> None:
    assert not [flag.shown for flag in flags if not flag.help]


@pytest.mark.parametrize(("command", "flags"), list(all_flags()), ids=lambda x: x if isinstance(x, str) else "")
def test_layouts_name_existing_flags(command: str, flags: list[Flag]) -> None:
    """Except settings that only other families have."""
    words = tuple(command.replace("PRESET", "quickstart").replace("moe-cpu", "quickstart").split())
    layout = getattr(flags_of(COMMANDS[words]), "layout", {})
    known = {flag.name for flag in flags}
    for _, others in all_flags() if command.startswith(("train", "plan")) else ():
        known |= {flag.name for flag in others}
    assert {name for names in layout.values() for name in names} <= known
