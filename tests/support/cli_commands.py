"""The commands of `linnet` and the dataclasses of their flags."""

from __future__ import annotations

import importlib

COMMANDS: dict[tuple[str, ...], str] = {
    ("bench",): "bench.Flags",
    ("data", "prepare"): "data.PrepareFlags",
    ("data", "show"): "data.ShowFlags",
    ("data", "check"): "data.CheckFlags",
    ("data", "embed"): "data_embed.EmbedFlags",
    ("eval",): "evaluate_flags.Flags",
    ("imagine",): "imagine.Flags",
    ("import",): "convert_flags.ImportFlags",
    ("export",): "convert_flags.ExportFlags",
    ("launch",): "launch.Flags",
    ("train", "quickstart"): "parse.RunFlags",
    ("train", "prior-emoji"): "parse.RunFlags",
    ("plan", "quickstart"): "plan.Flags",
    ("presets",): "presets.Flags",
    ("quickstart",): "quickstart.Flags",
    ("report",): "report.Flags",
    ("sample",): "sample_flags.Flags",
    ("serve",): "serve.Flags",
    ("tokenizer", "train"): "tokenizer.TrainFlags",
    ("tokenizer", "show"): "tokenizer.ShowFlags",
    ("verify",): "verify.Flags",
}
"""The commands and their flags. `test_no_command_is_missing` of cli/test_local_paths.py fails if this list is not complete."""


def flags_of(name: str) -> type:
    module, _, cls = name.partition(".")
    return getattr(importlib.import_module(f"linnet.cli.{module}"), cls)
