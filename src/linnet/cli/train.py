"""`linnet train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linnet.cli.advice import needed_prompt
from linnet.cli.finetune import parse_fine_tuning
from linnet.cli.parse import config_first, flag_value, parse_run
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.convert.dalle2.parts import DallE2Config

WORDS = """Trains a model. The same command continues a run that was interrupted, exactly.

PRESET starts from random weights. --from RUN|FILE in place of PRESET fine-tunes what you have, on --data.source, into a new run.

--config FILE.json in place of PRESET: a run's config.json, or a settings file of DALLE2-pytorch's prior as it is, whose paths
--data.images, --data.texts and --data.metadata (or --data.source) replace."""


def train_command(argv: list[str]) -> int:
    origin = flag_value(argv, "--from")
    if origin is not None:
        config, out, quiet = parse_fine_tuning(argv, Path(origin), WORDS)
        return run_training(config, out, quiet)
    argv = config_first(argv)
    parts = _reference(argv)
    if parts is not None:
        return _train_reference(argv, parts)
    flags = parse_run(argv, "train", WORDS)
    if flags.keep_optimizer:
        raise invalid(
            "--keep-optimizer", True, "used with --from RUN, whose optimizer state it keeps", "add --from RUN"
        )
    out = flags.out or default_folder(argv[0], flags.config.preset)
    return run_training(flags.config, out, flags.quiet)


def default_folder(name: str, preset: str) -> Path:
    """Return the output folder: a run is resumed in its own folder; anything else goes to runs/PRESET."""
    return Path(name) if (Path(name) / "config.json").is_file() else Path("runs") / preset


def run_training(config: RunConfig, out: Path, quiet: bool, remarks: Sequence[str] = ()) -> int:
    """Train a run. `remarks` about its settings are printed and logged as events of the run."""
    from linnet.runs.environment import keep_memory

    if (
        config.family == "prior"
    ):  # a third faster for 25% more memory; a vq update gains little and would take 40% more memory
        keep_memory()  # must be called before JAX is imported
    from linnet.cli.startup import init_jax
    from linnet.runs.folder import RunFolder
    from linnet.train.interrupt import EXIT_INTERRUPTED
    from linnet.train.loop import train

    init_jax()
    if remarks:
        keep_remarks(config, out, remarks)
    outcome = train(config, RunFolder(out), quiet=quiet)
    if not outcome.finished:
        return EXIT_INTERRUPTED
    if not quiet:
        print(
            f"The run is in {out}. Next: linnet eval {out}; linnet sample {out}{needed_prompt(config.model)}; linnet report {out}"
        )
    return 0


def _reference(argv: list[str]) -> DallE2Config | None:
    """Read the config file, if it is one of DALLE2-pytorch."""
    if not argv or not argv[0].endswith(".json") or not Path(argv[0]).is_file():
        return None
    from linnet.convert.dalle2.parts import is_reference, read_json, read_parts

    values = read_json(Path(argv[0]))
    return read_parts(values, Path(argv[0])) if is_reference(values) else None


def _train_reference(argv: list[str], parts: DallE2Config) -> int:
    """Train from a DALLE2-pytorch config. Flags are applied before its paths are opened, because they may correct them."""
    from linnet.convert.dalle2.config import folder_hint, run_config
    from linnet.convert.dalle2.data import open_config
    from linnet.convert.dalle2.tracker import loaded_file

    flags = parse_run(argv, "train", WORDS, run_config(parts))
    config, remarks = open_config(parts, flags.config)
    out, checkpoint = flags.out or folder_hint(parts, Path(argv[0])), loaded_file(parts)
    if checkpoint is not None:
        config, loaded = _loaded(config, out, checkpoint)
        remarks = [*remarks, *loaded]
    return run_training(config, out, flags.quiet, remarks)


def _loaded(config: RunConfig, out: Path, checkpoint: Path) -> tuple[RunConfig, list[str]]:
    """Start a new run from the checkpoint; an existing run resumes from its own."""
    from linnet.cli.import_prior import start_from_checkpoint
    from linnet.cli.startup import init_jax
    from linnet.config import codec as configs
    from linnet.runs.folder import RunFolder
    from linnet.train.exports import read_exports

    saved = RunFolder(out).config
    if saved.exists():
        ours = configs.load(saved)
        return dataclasses.replace(config, model=ours.model, optim=ours.optim), []
    init_jax()
    read_exports(config)
    return start_from_checkpoint(checkpoint, out, config)


def keep_remarks(config: RunConfig, out: Path, remarks: Sequence[str]) -> None:
    """Print and log the remarks. All checks that could reject the run come first, so that a run that cannot start writes nothing."""
    import sys

    from linnet.runs.folder import RunFolder
    from linnet.runs.metrics import MetricsLog, require_trackers
    from linnet.train.resume import check_resumable
    from linnet.train.tasks import open_task

    folder = RunFolder(out)
    require_trackers(config.train.trackers)
    check_resumable(config, folder, open_task(config).fingerprint)
    folder.create()
    with folder.lock(), MetricsLog(out) as log:
        for remark in remarks:
            print(remark, file=sys.stderr)
            log.write("event", 0, event="warning", message=remark)
