"""Parse flags into dataclasses with tyro. An unknown or malformed flag exits with code 2 and suggests the closest known one."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

import tyro

from linnet.config import codec as configs
from linnet.config import presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError
from linnet.core.local_path import check_local, is_free_text
from linnet.data.sources.locations import retyped

T = TypeVar("T")


def parse(arguments: type[T], argv: list[str], command: str, words: str, default: T | None = None) -> T:
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    flags: Any = tyro.cli(arguments, args=argv, prog=f"linnet {command}", description=words, **kwargs)
    # Here the defaults come from a config file. Flags may replace its paths, which are checked where they are opened.
    if isinstance(default, RunFlags) and isinstance(flags, RunFlags):
        flags = dataclasses.replace(flags, config=retyped(flags.config, default.config))
    known = dict(_strings(default)) if default is not None else {}
    for name, value in _strings(flags):
        if known.get(name) != value:
            check_local(name, value)
    return flags


def _strings(flags: Any, prefix: str = "") -> Iterator[tuple[str, str | PurePath]]:
    """Yield every path and string (except free text) of a flags dataclass, with its name on the command line."""
    hints = typing.get_type_hints(type(flags), include_extras=True)
    for name in (field.name for field in dataclasses.fields(flags)):
        value, hint = getattr(flags, name), hints[name]
        if isinstance(value, RunConfig):  # its settings are top-level flags without a prefix
            yield from _strings(value)
        elif dataclasses.is_dataclass(value):
            yield from _strings(value, f"{prefix}{name}.")
        elif not is_free_text(hint):
            positional = tyro.conf.Positional in getattr(hint, "__metadata__", ())
            names = [mark.name for mark in getattr(hint, "__metadata__", ()) if getattr(mark, "name", None)]
            flag = names[0] if names else prefix + name.replace("_", "-")
            shown = name.upper() if positional else f"--{flag}"
            parts = value if isinstance(value, tuple) else (value,)
            for i, part in enumerate(parts):
                if isinstance(part, str | PurePath):
                    yield (f"{shown}[{i}]" if len(parts) > 1 else shown), part


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Flags of training commands: the output folder and all settings of the run. The preset determines the model family."""

    config: Annotated[tyro.conf.AvoidSubcommands[RunConfig], tyro.conf.arg(name="")]
    out: Path | None = None
    """The run's folder. Default: runs/PRESET (with --from: runs/NAME-tuned). An existing run is resumed."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Fine-tune: start from the weights, codebooks, tokenizer and model settings of a run, an import, or a file written by `linnet
    export`, instead of a PRESET. Defaults: its optimizer at 0.3 of its peak learning rate, a cosine schedule over at most 1,000 steps
    with 5% warm-up; with --lora.rank: adamw at 0.6 / d_model, at most 5e-3. Flags override all of them."""
    checkpoint: str = "best"
    """Checkpoint of the run in --from: best (by validation loss), latest or a step."""
    keep_optimizer: bool = False
    """With --from RUN: load its optimizer state too (the learning rate schedule restarts)."""
    quiet: bool = False
    """Do not print progress."""


def parse_run(argv: list[str], command: str, words: str, base: RunConfig | None = None) -> RunFlags:
    """Parse `PRESET [flags]`: first a preset (or the path of a config.json or a run), then flags that override its settings. `base`:
    its config, if the caller has read it already."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] not in ("-h", "--help"):
            raise UserError(f"name a preset first, as in `linnet {command} quickstart {' '.join(argv)}`. {_known()}")
        words += f"\n\nPRESET comes first. {_known()} The defaults below are those of quickstart."
        parse(RunFlags, ["--help"], f"{command} PRESET", words, RunFlags(config=presets.get("quickstart")))
    config = base_config(argv[0]) if base is None else base
    return parse(RunFlags, argv[1:], f"{command} {argv[0]}", words, RunFlags(config=config))


def flag_value(argv: list[str], flag: str) -> str | None:
    """Return the value of a flag given as `--flag VALUE` or `--flag=VALUE` (- and _ are equivalent), or None."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if not equals and i + 1 == len(argv):
            raise UserError(f"{flag} needs a value. Fix: {flag} VALUE.")
        return value if equals else argv[i + 1]
    return None


def config_first(argv: list[str]) -> list[str]:
    """Move the file of `--config FILE` to the front, so that it is equivalent to FILE in place of PRESET."""
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != "--config":
            continue
        if not equals and i + 1 == len(argv):
            raise UserError("--config needs the path of a file. Fix: --config FILE.json.")
        rest = argv[:i] + argv[i + (1 if equals else 2) :]
        if rest and not rest[0].startswith("-"):
            raise UserError(f"{rest[0]!r} and --config both say what to train. Fix: leave one of them out.")
        return [value if equals else argv[i + 1], *rest]
    return argv


def base_config(name: str) -> RunConfig:
    check_local("PRESET or RUN", name)
    path = Path(name)
    if path.suffix == ".json":
        return configs.load(path)
    if (path / "config.json").is_file():
        return configs.load(path / "config.json")
    if name not in presets.PRESETS and path.exists():
        raise UserError(_no_run(path))
    return presets.get(name)


def _no_run(path: Path) -> str:
    """Return the message for a path that exists but is not a run."""
    on_it = f"to train on it as data, `linnet train PRESET --data.source {path}`"
    if not path.is_dir():
        return f"{path} is a file, and neither a preset nor a run. Fix: {on_it}; a config file's name ends in .json."
    return (
        f"{path} is a folder, but not a run: it has no config.json. Fix: name a folder made by `linnet train`; {on_it}."
    )


def _known() -> str:
    return f"Presets: {', '.join(presets.PRESETS)}; or the path of a config.json, which repeats its run."
