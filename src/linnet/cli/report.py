"""`linnet report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from linnet.cli.parse import parse
from linnet.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Flags:
    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    data_source: Annotated[str | None, tyro.conf.arg(name="data.source")] = None
    """New location of the run's data, if it was moved. The content must be that of training. Default: its recorded location."""


def report_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "report", "Write a self-contained HTML report, report.html, into the run folder.")
    from linnet.report.build import write_report

    if not (flags.run / "config.json").is_file():
        raise UserError(f"{flags.run} is not a run: it has no config.json. Fix: name a folder made by `linnet train`.")
    if flags.data_source is not None:
        from linnet.config import codec
        from linnet.runs.relocated import check_same_data, data_fingerprint, relocated

        cfg = relocated(codec.load(flags.run / "config.json"), flags.data_source)
        check_same_data(flags.run, data_fingerprint(cfg), flags.data_source)
    print(f"Wrote {write_report(flags.run)}")
    return 0
