"""docs/migrate.md names every setting that Linnet reads from the three references, and only settings that Linnet has."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from linnet.cli import main
from linnet.config.schema import DATA, OptimConfig, RunConfig, TrainConfig
from linnet.convert.dalle2.schema import DECODERS, DallE2Config
from linnet.convert.grok import settings as grok
from linnet.convert.transformer_vq_settings import OPTIM
from linnet.models import registry
from linnet.models.prior.reference import NETWORK
from linnet.models.vq.convert import CODE_NAMES, NEEDED, NOT_THE_MODEL, UNIT_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
NOTES = {"is_train", "eos_id", "opt", "params_file", "note", "perturb_seed", "min_shortcode_margin"}
"""Settings of reference files made for tests, not arguments of launch.py."""
HELP = (
    "train quickstart",
    "train moe-cpu",
    "train prior-emoji",
    "import",
    "export",
    "eval",
    "sample",
    "serve",
    "verify",
)
HELP += ("data prepare", "tokenizer train")


def sections(kind: Any, path: str = "") -> dict[str, list[str]]:
    """Path of each part of a settings file -> its keys."""
    found: dict[str, list[str]] = {path: [field.name for field in dataclasses.fields(kind)]}
    for name, hint in typing.get_type_hints(kind).items():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                found |= sections(inner, f"{path}.{name}".lstrip("."))
    return found


KEYS = sections(DallE2Config)


def keys_under(heading: str) -> set[str]:
    """Names in the first column of the table under a heading of the page."""
    body = re.split(r"^#", PAGE.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("path", [path for path in KEYS if path])
def test_every_key_of_a_dalle2_config_is_on_the_page(path: str) -> None:
    assert keys_under(f"#### `{path}`") == set(KEYS[path])


def test_parts_of_a_dalle2_config_have_a_heading() -> None:
    assert set(KEYS[""]) <= set(re.findall(r"^#### `([\w.]+)`$", PAGE, re.MULTILINE))
    assert [name for name in DECODERS if f"`{name}`" not in PAGE] == []


def test_network_keys_have_the_fields_that_the_import_uses() -> None:
    rows = {line for line in PAGE.splitlines() if line.startswith("|")}
    missing = [
        (theirs, ours)
        for theirs, ours in NETWORK.items()
        if not any(f"`{theirs}`" in row and f"`model.{ours}`" in row for row in rows)
    ]
    assert missing == []


def test_every_argument_of_launch_py_is_on_the_page() -> None:
    listed = keys_under("### Flags of launch.py")
    assert set(OPTIM) | set(NEEDED) | (NOT_THE_MODEL - NOTES) | {"param_dtype"} <= listed
    files = keys_under("### Files of Transformer-VQ")
    assert {*UNIT_NAMES.values(), *CODE_NAMES.values()} <= files


def test_every_size_of_a_grok_config_is_on_the_page() -> None:
    table = PAGE.partition("\n### Settings of Grok-1\n")[2].partition("\n### ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    missing = [
        (theirs, ours)
        for theirs, ours in grok.NAMES.items()
        if not any(f"`{theirs}`" in row and f"`model.{ours}`" in row for row in rows)
    ]
    assert missing == []
    assert [name for name in grok.HIDDEN if f"`{name}`" not in table] == []


def test_every_setting_that_the_page_names_exists() -> None:
    models = [registry.config_class(name) for name in registry.names()]
    parts = {"model": models, "data": [*DATA.values()], "optim": [OptimConfig], "train": [TrainConfig]}
    known = {
        f"{part}.{field.name}" for part, kinds in parts.items() for kind in kinds for field in dataclasses.fields(kind)
    }
    known |= {field.name for field in dataclasses.fields(RunConfig)} | {
        f"{path}.{key}" for path, keys in KEYS.items() for key in keys
    }
    named = set(re.findall(r"`((?:model|data|optim|train)\.[a-z_]+)`", PAGE))
    assert len(named) > 60
    assert sorted(named - known) == []


def test_every_flag_that_the_page_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = ""
    for words in HELP:
        with pytest.raises(SystemExit):
            main([*words.split(), "--help"])
        known += capsys.readouterr().out
    flags = set(re.findall(r"--[a-z][a-z-]*(?:\.[a-z-]+)?(?![\w=])", known))
    prose = re.sub(r"`--command`|`--d_model=768`|`--grad_clip`|`--wd_lam`", "", PAGE)
    named = set(re.findall(r"--[a-z][\w.-]*\w", prose)) - {"--config", "--processes"}
    assert len(named) > 60
    assert sorted(named - flags) == []


def test_requirements_of_grok_1_are_those_that_the_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "grok-1", "--plan"])
    printed = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "grok.md").read_text()
    table = page.partition("## Requirements")[2].partition("\n## ")[0]
    numbers = re.findall(r"\d{1,3}(?:,\d{3}){2,}|\d+\.\d GB", table)
    assert len(numbers) == 14
    assert [number for number in numbers if number not in printed] == []
