"""`linnet train --from`: start a new run from the weights of another."""

from __future__ import annotations

from pathlib import Path

from linnet.cli.parse import RunFlags, flag_value, parse
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError


def parse_fine_tuning(argv: list[str], path: Path, description: str) -> tuple[RunConfig, Path, bool]:
    """Return the run's config, its folder, and whether it is quiet. The same command resumes an interrupted run, even if the parent
    no longer exists."""
    if not argv[0].startswith("-"):
        raise UserError(f"{argv[0]!r} and --from {path} both say what to start from. Fix: leave one of them out.")
    from linnet.train import finetune

    out = Path(flag_value(argv, "--out") or finetune.default_out(path))
    started = finetune.started_config(out, path)
    config = _new(argv, path) if started is None else started
    flags = parse(RunFlags, argv, f"train --from {path}", description, RunFlags(config=config))
    config = finetune.complete_config(
        flags.config,
        out,
        is_new=started is None,
        checkpoint=flags.checkpoint,
        keep_optimizer=flags.keep_optimizer,
        log=(lambda text: None) if flags.quiet else print,
    )
    return config, out, flags.quiet


def _new(argv: list[str], path: Path) -> RunConfig:
    from linnet.train.finetune import new_config

    steps, rank = flag_value(argv, "--optim.steps") or "", flag_value(argv, "--lora.rank") or "0"
    sources = ("--data.source", "--data.images")
    return new_config(
        path,
        flag_value(argv, "--checkpoint") or "best",
        steps=int(steps) if steps.isdecimal() else None,
        lora=rank != "0",
        other_data=any(flag_value(argv, name) is not None for name in sources),
    )
