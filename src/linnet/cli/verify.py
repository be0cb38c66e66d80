"""`linnet verify`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from linnet.cli.parse import parse

if TYPE_CHECKING:
    from linnet.verify import Verification

DESCRIPTION = """Compare this implementation with outputs of the reference implementations. Exits with code 1 if an error exceeds the
tolerance.

Without files, the installation is checked against a small set of reference files that is installed with Linnet."""


@dataclasses.dataclass(frozen=True)
class Flags:
    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Reference files: .npz with weights, inputs and expected outputs; Grok-1 references (model folder, unit tests, sampling
    streams); or the folder of an official Transformer-VQ checkpoint with its official.json. Default: the set that is installed
    with Linnet."""
    tolerance: float = 1e-5
    """Maximum error, relative to the largest value of each tensor."""
    json: bool = False
    """Print one JSON object per file, one per line."""


def verify_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "verify", DESCRIPTION)
    from rich.console import Console

    from linnet.parallel.cluster import init_jax
    from linnet.verify import render, verify_file
    from linnet.verify.golden import installed_goldens

    init_jax()
    passed, n_tensor, files = True, 0, flags.files or installed_goldens()
    for path in files:
        verification = verify_file(path, flags.tolerance)
        passed &= verification.passed
        n_tensor += len(verification.checks)
        if flags.json:
            print(json.dumps(verification.to_json()), flush=True)
        elif flags.files or not verification.passed:
            Console().print(render(verification))
        else:
            print(f"{path.parent.name}/{path.stem}: {_summary(verification)}", flush=True)
    if not flags.files and not flags.json:
        outcome = "reproduces" if passed else "does NOT reproduce"
        print(
            f"This installation {outcome} the references: {n_tensor} tensors in {len(files)} files, tolerance {flags.tolerance:g}."
        )
    return 0 if passed else 1


def _summary(verification: Verification) -> str:
    """Return one line about a file that passed. Matmuls in bfloat16 have their own bounds, which `linnet verify FILE` lists."""
    errors = [check.error for check in verification.checks]
    exact = [error for error in errors if error <= verification.tolerance]
    line = f"{len(exact)} tensors within {verification.tolerance:g}, largest error {max(exact, default=0.0):.1e}"
    return line if len(exact) == len(errors) else f"{line}; {len(errors) - len(exact)} in bfloat16, within their bounds"
