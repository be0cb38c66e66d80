"""`linnet train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linnet.api.training import default_folder, open_reference, read_reference, run_training
from linnet.cli.finetune import parse_fine_tuning
from linnet.cli.parse import config_first, flag_value, parse_run
from linnet.cli.sample_flags import needed_prompt
from linnet.config.schema import RunConfig
from linnet.core.errors import invalid

DESCRIPTION = """Train a model. Run the same command again to resume an interrupted run exactly where it stopped.

PRESET trains from random weights. To fine-tune an existing model into a new run, give --from RUN|FILE instead of PRESET.

--config FILE.json instead of PRESET trains with a run's config.json, or with an unmodified config file of DALLE2-pytorch's prior
(--data.images, --data.texts and --data.metadata, or --data.source, replace its paths)."""


def train_command(argv: list[str]) -> int:
    origin = flag_value(argv, "--from")
    if origin is not None:
        config, out, quiet = parse_fine_tuning(argv, Path(origin), DESCRIPTION)
        return _train(config, out, quiet)
    argv = config_first(argv)
    parts = read_reference(Path(argv[0])) if argv else None
    if parts is not None:
        from linnet.convert.dalle2.config import run_config

        flags = parse_run(argv, "train", DESCRIPTION, run_config(parts))
        config, out, remarks = open_reference(parts, Path(argv[0]), flags.config, flags.out)
        return _train(config, out, flags.quiet, remarks)
    flags = parse_run(argv, "train", DESCRIPTION)
    if flags.keep_optimizer:
        raise invalid(
            "--keep-optimizer", True, "used with --from RUN, whose optimizer state it keeps", "add --from RUN"
        )
    out = flags.out or default_folder(argv[0], flags.config.preset)
    return _train(flags.config, out, flags.quiet)


def _train(config: RunConfig, out: Path, quiet: bool, remarks: Sequence[str] = ()) -> int:
    from linnet.train.interrupt import EXIT_INTERRUPTED

    if not run_training(config, out, remarks, quiet=quiet).finished:
        return EXIT_INTERRUPTED
    if not quiet:
        print(
            f"The run is in {out}. Next: linnet eval {out}; linnet sample {out}{needed_prompt(config.model)}; linnet report {out}"
        )
    return 0
