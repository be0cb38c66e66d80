"""`linnet report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from linnet.cli.parse import parse
from linnet.errors import UserError


@dataclasses.dataclass(frozen=True)
class Flags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""


def report_command(argv: list[str]) -> int:
    flags = parse(
        Flags, argv, "report", "Writes report.html into the run's folder: one page, nothing loaded from outside."
    )
    from linnet.train.report import write_report

    if not (flags.run / "config.json").is_file():
        raise UserError(f"{flags.run} is not a run: it has no config.json. Fix: name a folder made by `linnet train`.")
    print(f"Wrote {write_report(flags.run)}")
    return 0
