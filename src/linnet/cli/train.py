"""`linnet train`."""

from __future__ import annotations

from pathlib import Path

from linnet.cli.parse import parse_run
from linnet.config import RunConfig


def train_command(argv: list[str]) -> int:
    flags = parse_run(argv, "train", "Trains a model. The same command continues a run that was interrupted, exactly.")
    out = flags.out or default_folder(argv[0], flags.config.preset)
    return run_training(flags.config, out, flags.quiet)


def default_folder(name: str, preset: str) -> Path:
    """A run is continued in its own folder; anything else goes to runs/PRESET."""
    return Path(name) if (Path(name) / "config.json").is_file() else Path("runs") / preset


def run_training(config: RunConfig, out: Path, quiet: bool) -> int:
    from linnet.cli.startup import prepare_jax
    from linnet.train.folder import RunFolder
    from linnet.train.interrupt import EXIT_INTERRUPTED
    from linnet.train.loop import train

    prepare_jax()
    outcome = train(config, RunFolder(out), quiet=quiet)
    if not outcome.finished:
        return EXIT_INTERRUPTED
    if not quiet:
        print(f"The run is in {out}. Next: linnet eval {out}; linnet sample {out}; linnet report {out}")
    return 0
