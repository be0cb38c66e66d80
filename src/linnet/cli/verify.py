"""`linnet verify`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from linnet.cli.parse import parse


@dataclasses.dataclass(frozen=True)
class Flags:
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Reference files (.npz with weights, inputs and expected outputs), or Grok-1's: a model's folder, units, a runner's streams."""
    tolerance: float = 1e-5
    """Largest error allowed, relative to the largest value of each tensor."""
    json: bool = False
    """One JSON object a file, a line each."""


def verify_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "verify", "Runs this implementation on reference files. Exits 1 beyond the tolerance.")
    from rich.console import Console

    from linnet.cli.startup import prepare_jax
    from linnet.errors import UserError
    from linnet.train.verify import render, verify_file

    if not flags.files:
        raise UserError("there is nothing to verify. Fix: name one or more reference files.")
    prepare_jax()
    passed = True
    for path in flags.files:
        verification = verify_file(path, flags.tolerance)
        passed &= verification.passed
        if flags.json:
            print(json.dumps(verification.to_json()))
        else:
            Console().print(render(verification))
    return 0 if passed else 1
