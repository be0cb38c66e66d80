"""The flags of a command: read from its dataclass, parsed by tyro, and put back into the dataclass.

tyro sees a flat list of flags in named groups, so that `--help` starts with the common ones and shows `PATH` instead of
`{None}|PATH`. A flags dataclass may have a `layout`, which lists groups in order; the group "" comes first. Flags that it does not
list follow in the group of their prefix (`--optim.lr`: optim).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from linnet.config.schema import RunConfig
from linnet.models import registry

T = TypeVar("T")
Layout = Mapping[str, tuple[str, ...]]
"""Group title -> names of its flags, without dashes."""
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: "{True,False}"}
METAVARS_BY_NAME = {
    **dict.fromkeys(("source", "images", "texts", "encodings", "metadata", "condition", "base", "tokenizer"), "PATH"),
    **dict.fromkeys(("validation-files", "test-files"), "PATH"),
    **dict.fromkeys(("column", "image-key", "text-key", "caption-key", "split-key", "end-token", "targets"), "NAME"),
    **dict.fromkeys(("preset", "family", "encoder", "chip"), "NAME"),
    **dict.fromkeys(("prompt", "stop"), "TEXT"),
    "checkpoint": "best|latest|STEP",
    "family": f"{{{','.join(registry.FAMILIES)}}}",
    "exports": "WHEN:WHAT:PATH",
    "hbm": "SIZE",
    "host": "ADDRESS",
    "mesh": "AXIS=N,...",
    "release": "VERSION",
    "FILES": "FILE",
    "RUNS": "RUN",
    "SOURCES": "SOURCE",
    "WHAT": "DATA|RUN",
}
"""Placeholders that say more than the type, by the last part of a flag's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    path: tuple[str, ...]
    """Field names from the flags dataclass to the value."""
    name: str
    """Name on the command line without dashes; of a positional argument, the name in errors."""
    hint: Any
    """Type of the value, with its annotations."""
    default: Any
    """`dataclasses.MISSING` if the flag is required."""
    help: str

    @property
    def is_positional(self) -> bool:
        return tyro.conf.Positional in _marks(self.hint)

    @property
    def shown(self) -> str:
        return self.name if self.is_positional else f"--{self.name}"

    @property
    def metavar(self) -> str:
        word = self.name if self.is_positional else None
        text = _metavar(self.hint, METAVARS_BY_NAME.get(self.name.rpartition(".")[2], word))
        if not self.is_positional or _is_list(self.hint) == (self.default is not dataclasses.MISSING):
            return text
        return f"{text[1:].split()[0]} {text}" if _is_list(self.hint) else f"[{text}]"


def list_flags(cls: type, default: Any = None) -> list[Flag]:
    """Return the flags of a dataclass, with the values of `default` (or the fields' own) as defaults."""
    return list(_flags(cls, default, (), ""))


def parse_flags(cls: type[T], argv: list[str], prog: str, description: str, default: T | None = None) -> T:
    """Parse `argv`. `--help` and malformed flags exit, as in any tyro program."""
    flags = list_flags(cls, default)
    groups = _grouped(flags, getattr(cls, "layout", {}))
    root = _struct(groups.pop(""), groups)
    if {"-h", "--help"} & set(argv):  # tyro would neither wrap the description nor keep its line breaks
        print(wrap(description), end="\n\n", flush=True)
    parsed = tyro.cli(root, args=argv, prog=prog, description="")
    found = dict(vars(parsed))
    for i in range(len(groups)):
        found |= vars(found.pop(f"group_{i}"))
    return _build(cls, default, {flag.path: found[_key(flag)] for flag in flags}, ())


def _flags(cls: type, default: Any, path: tuple[str, ...], prefix: str) -> Iterator[Flag]:
    hints, helps = typing.get_type_hints(cls, include_extras=True), _docstrings(cls)
    for field in dataclasses.fields(cls):
        value, hint, own = _value(field, default), hints[field.name], (*path, field.name)
        parts = typing.get_args(hint)
        if type(None) in parts and any(map(dataclasses.is_dataclass, parts)):  # `RunConfig.parent` is no flag
            continue
        nested = type(value) if dataclasses.is_dataclass(value) else hint
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            # The settings of a run are flags without the prefix of the field that holds them.
            yield from _flags(nested, value, own, prefix if nested is RunConfig else f"{prefix}{field.name}.")
        else:
            names = [mark.name for mark in _marks(hint) if getattr(mark, "name", None)]
            positional = tyro.conf.Positional in _marks(hint)
            plain = field.name.upper() if positional else prefix + field.name.replace("_", "-")
            yield Flag(
                path=own, name=names[0] if names else plain, hint=hint, default=value, help=helps.get(field.name, "")
            )


def _value(field: dataclasses.Field[Any], default: Any) -> Any:
    if default is not None and default is not dataclasses.MISSING:
        return getattr(default, field.name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field, as one line. Inherited fields have those of the base class."""
    base = cls.__base__
    found = dict(_docstrings(base)) if base is not None and dataclasses.is_dataclass(base) else {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _grouped(flags: list[Flag], layout: Layout) -> dict[str, list[Flag]]:
    """Return the flags by group, in the order of the layout."""
    by_name = {flag.name: flag for flag in flags}
    groups: dict[str, list[Flag]] = {"": []}
    for title, names in layout.items():  # names of flags that this run's model family does not have are skipped
        groups.setdefault(title, []).extend(by_name.pop(name) for name in names if name in by_name)
    for flag in by_name.values():
        groups.setdefault(flag.name.rpartition(".")[0] if len(flag.path) > 1 else "", []).append(flag)
    return {title: group for title, group in groups.items() if group or not title}


def _struct(flags: list[Flag], groups: Mapping[str, list[Flag]]) -> type:
    """Return a dataclass for tyro with these flags and one nested dataclass per group."""
    fields: list[tuple[str, Any, Any]] = []
    for flag in flags:
        default = {} if flag.default is dataclasses.MISSING else {"default": flag.default}
        fields.append((_key(flag), _annotated(flag), dataclasses.field(**default)))
    for i, (title, group) in enumerate(groups.items()):
        fields.append((f"group_{i}", Annotated[_struct(group, {}), tyro.conf.arg(name=title)], dataclasses.field()))
    return dataclasses.make_dataclass("Flags", fields, kw_only=True, frozen=True, namespace={"__doc__": ""})


def _annotated(flag: Flag) -> Any:
    text, default = _help(flag)
    metavar = None if _plain(flag.hint) is bool else flag.metavar
    settings = tyro.conf.arg(name=flag.name, prefix_name=False, metavar=metavar, help=text, help_behavior_hint=default)
    return Annotated[flag.hint, settings]


def _help(flag: Flag) -> tuple[str, str]:
    """Return the help, and its end about the default: what the help says after "Default:", or else the value."""
    text, marker, rest = flag.help.partition("Default: ")
    if flag.default is dataclasses.MISSING:
        return flag.help, "(required)"
    if flag.default in (None, "", ()):
        missing = "optional" if flag.is_positional else f"default: {None if flag.default is None else 'none'}"
        return text.strip(), marker + rest or f"({missing})"
    value = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    return flag.help, f"(default: {value})"


def _build(cls: type, default: Any, values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """Make the dataclass from the values of its flags."""
    kwargs: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value, own = _value(field, default), (*path, field.name)
        if own in values:
            value = values[own]
        elif any(key[: len(own)] == own for key in values):
            value = _build(type(value) if dataclasses.is_dataclass(value) else hints[field.name], value, values, own)
        kwargs[field.name] = value
    return cls(**kwargs)


def _key(flag: Flag) -> str:
    return "_".join(flag.path)


def _marks(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if _marks(hint) else hint


def _is_list(hint: Any) -> bool:
    return Ellipsis in typing.get_args(_plain(hint))


def _metavar(hint: Any, word: str | None) -> str:
    """Return the placeholder of a type, with `word` in place of the type's name. None is not shown: the help says what it means."""
    hint = _plain(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if origin in (types.UnionType, typing.Union):
        return "|".join(_metavar(part, word) for part in args if part is not type(None))
    if origin is tuple:
        return f"[{_metavar(args[0], word)} ...]" if Ellipsis in args else " ".join(_metavar(a, word) for a in args)
    return word or METAVARS[hint]


def wrap(text: str) -> str:
    """Wrap each paragraph to the width of the terminal."""
    width = shutil.get_terminal_size().columns
    return "\n\n".join(textwrap.fill(" ".join(p.split()), width, break_on_hyphens=False) for p in text.split("\n\n"))
