"""`linnet train --from`: start a new run from the weights of another."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from linnet.cli.parse import RunFlags, flag_value, parse
from linnet.config import codec as configs
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.parallel.cluster.environment import ALONE, find_cluster_env

if TYPE_CHECKING:
    from linnet.train.parent import Origin


def parse_fine_tuning(argv: list[str], path: Path, words: str) -> tuple[RunConfig, Path, bool]:
    """Return the run's config, its folder, and whether it is quiet. The same command resumes an interrupted run, even if the parent
    no longer exists."""
    if not argv[0].startswith("-"):
        raise UserError(f"{argv[0]!r} and --from {path} both say what to start from. Fix: leave one of them out.")
    out = Path(flag_value(argv, "--out") or Path("runs") / f"{path.absolute().stem}-tuned")
    started = _started(out, path)
    config = _new(argv, path) if started is None else started
    flags = parse(RunFlags, argv, f"train --from {path}", words, RunFlags(config=config))
    config = flags.config
    assert config.parent is not None
    if started is None:
        parent = dataclasses.replace(config.parent, optimizer=flags.keep_optimizer)
        return _with_text(dataclasses.replace(config, parent=parent), out, flags.quiet), out, flags.quiet
    if flags.keep_optimizer and not config.parent.optimizer:
        raise invalid(
            "--keep-optimizer", True, f"as when {out} was started: left out", "leave it out, or choose another --out"
        )
    if flags.checkpoint.isdecimal() and int(flags.checkpoint) != config.parent.step:
        needs = f"{config.parent.step}, which {out} was started from"
        raise invalid("--checkpoint", flags.checkpoint, needs, "leave it out, or choose another --out")
    return _with_text(config, out, flags.quiet), out, flags.quiet


def _with_text(config: RunConfig, out: Path, quiet: bool) -> RunConfig:
    """Encode plain text with the model's own tokenizer. Not done with several processes, which would write the same files: they need
    prepared data."""
    if find_cluster_env(os.environ) != ALONE:
        return config
    from linnet.train.finetune_data import with_encoded_text

    return with_encoded_text(config, out, (lambda text: None) if quiet else print)


def _started(out: Path, path: Path) -> RunConfig | None:
    """Return the config of the run in the folder, if there is one; it must have the same parent."""
    if not (out / "config.json").is_file():
        return None
    if out.absolute() == path.absolute():
        raise UserError(
            f"--out is {out}, the run to start from, and nothing is overwritten. Fix: choose another --out."
        )
    found = configs.load(out / "config.json")
    if found.parent is not None and found.parent.path == str(path.absolute()):
        return found
    came = "random or imported weights" if found.parent is None else found.parent.path
    raise UserError(
        f"{out} holds a run that was started from {came}, not from {path}, and nothing is overwritten. Fix: choose another --out, or "
        f"continue that run with `linnet train {out}`."
    )


def _new(argv: list[str], path: Path) -> RunConfig:
    from linnet.train.finetune_config import tuned_config
    from linnet.train.parent import find_origin

    origin: Origin = find_origin(path, flag_value(argv, "--checkpoint") or "best")
    steps, rank = flag_value(argv, "--optim.steps") or "", flag_value(argv, "--lora.rank") or "0"
    sources = ("--data.source", "--data.images")
    return tuned_config(
        origin.cfg,
        origin.parent(),
        steps=int(steps) if steps.isdecimal() else None,
        lora=rank != "0",
        other_data=any(flag_value(argv, name) is not None for name in sources),
    )
