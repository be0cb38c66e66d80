"""What the commands of this folder share: flags, errors and output."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from linnet.bench.table import ResultTable, to_markdown, to_rich
from linnet.cli.flags import parse_flags
from linnet.core.errors import UserError

EXIT_USER = 2


@dataclasses.dataclass(frozen=True)
class Output:
    json: bool = False
    """Print one JSON object."""
    markdown: bool = False
    """Print a Markdown table."""


Flags = TypeVar("Flags", bound=Output)


def run_command(flags: type[Flags], name: str, measure: Callable[[Flags], tuple[dict[str, Any], ResultTable]]) -> None:
    """Parse the flags of `python -m benchmarks.NAME`, measure, and print the result."""
    from rich.console import Console

    module = sys.modules[measure.__module__]
    parsed = parse_flags(flags, sys.argv[1:], f"python -m benchmarks.{name}", (module.__doc__ or "").partition("\n")[0])
    try:
        result, table = measure(parsed)
    except UserError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)
    if parsed.json:
        print(json.dumps(result))
    elif parsed.markdown:
        print(to_markdown(table))
    else:
        Console().print(to_rich(table))


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
