"""Parse flags into dataclasses with tyro. An unknown or malformed flag exits with code 2 and suggests the closest known one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from linnet.cli.flags import Layout, list_flags, parse_flags
from linnet.config import presets
from linnet.config.resolve import base_config
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError
from linnet.core.local_path import check_local, is_free_text

T = TypeVar("T")


def parse(flags: type[T], argv: list[str], command: str, description: str, default: T | None = None) -> T:
    """Parse the flags of `linnet COMMAND`, and check that no path is a URL."""
    parsed: Any = parse_flags(flags, argv, f"linnet {command}", description, default)
    # Here the defaults come from a config file. Flags may replace its paths, which are checked where they are opened.
    if isinstance(default, RunFlags) and isinstance(parsed, RunFlags):
        from linnet.data.sources.locations import rebase_changed  # imports JAX, which --help does not need

        parsed = dataclasses.replace(parsed, config=rebase_changed(parsed.config, default.config))
    known = {flag.name: flag.default for flag in list_flags(flags, default)} if default is not None else {}
    for flag in list_flags(flags, parsed):
        if not is_free_text(flag.hint) and (flag.name not in known or known[flag.name] != flag.default):
            parts = flag.default if isinstance(flag.default, tuple) else (flag.default,)
            for i, part in enumerate(parts):
                if isinstance(part, str | PurePath):
                    check_local(f"{flag.shown}[{i}]" if len(parts) > 1 else flag.shown, part)
    return parsed


@contextlib.contextmanager
def named_as_flags(flags: Any) -> Iterator[None]:
    """Let an error of the library about one of the flags' fields name the flag: `--sequence-len` instead of `sequence_len`."""
    try:
        yield
    except UserError as error:
        if error.field is not None and error.field in {field.name for field in dataclasses.fields(flags)}:
            error.args = (f"--{error.field.replace('_', '-')}{str(error).removeprefix(error.field)}",)
        raise


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Flags of training commands: the output folder and all settings of the run. The preset determines the model family."""

    layout: ClassVar[Layout] = {
        "": (
            *("out", "from", "data.source", "data.images", "data.texts", "optim.steps", "optim.lr", "data.batch-size"),
            *("data.sequence-len", "data.update-len", "seed", "mesh", "quiet"),
        ),
        "optim": (),
        "data": (),
        "model": (),
        "train": (),
        "fine-tuning": ("lora.rank", "lora.alpha", "lora.targets", "checkpoint", "keep-optimizer"),
        "metadata": ("preset", "family", "data.base"),
    }
    config: RunConfig
    out: Path | None = None
    """Run folder. An existing run in it is resumed. Default: runs/PRESET; with --from: runs/NAME-tuned."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Fine-tune a run, an import or a file written by `linnet export`: start from its weights, codebooks, tokenizer and model
    settings instead of a PRESET. Unless flags override them: its optimizer at 0.3 of its peak learning rate, a cosine schedule
    over at most 1,000 steps with 5% warm-up; with --lora.rank, AdamW at 0.6 / d_model, at most 5e-3. Default: train from
    random weights."""
    checkpoint: str = "best"
    """Checkpoint of the run in --from: best (by validation loss), latest or a step."""
    keep_optimizer: bool = False
    """With --from RUN: also load its optimizer state. The learning rate schedule restarts."""
    quiet: bool = False
    """Do not print progress."""


def parse_run(argv: list[str], command: str, description: str, base: RunConfig | None = None) -> RunFlags:
    """Parse `PRESET [flags]`: first a preset (or the path of a config.json or a run), then flags that override its settings. `base`:
    its config, if the caller has read it already."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] not in ("-h", "--help"):
            raise UserError(f"name a preset first, as in `linnet {command} quickstart {' '.join(argv)}`. {_known()}")
        description += f"\n\n{_known()} Flags follow the preset and override its settings; the defaults below are those of quickstart."
        parse(RunFlags, ["--help"], f"{command} PRESET", description, RunFlags(config=presets.get("quickstart")))
    config = base_config(argv[0]) if base is None else base
    return parse(RunFlags, argv[1:], f"{command} {argv[0]}", description, RunFlags(config=config))


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


def _known() -> str:
    return f"Presets: {', '.join(presets.PRESETS)}; or the path of a config.json, whose run is repeated."
