"""`linnet presets`."""

from __future__ import annotations

import dataclasses
import json

from linnet.cli.parse import parse
from linnet.config import codec, presets


@dataclasses.dataclass(frozen=True)
class Flags:
    json: bool = False
    """Print the complete configs as JSON."""


def presets_command(argv: list[str]) -> int:
    flags = parse(Flags, argv, "presets", "List the presets.")
    if flags.json:
        print(json.dumps({name: codec.to_json(make()) for name, (_, make) in presets.PRESETS.items()}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    from linnet.core import params
    from linnet.models import registry

    table = Table("preset", "parameters", "data", "description", box=None)
    for name, (description, make) in presets.PRESETS.items():
        cfg = make()
        n = params.count(registry.get(cfg.family).param_specs(cfg.model))
        table.add_row(name, f"{n / 1e6:,.1f}M", cfg.data.source, description)
    Console().print(table)
    return 0
