"""What makes a family one: a folder and a line of the registry. The rest of the package asks for capabilities, never for names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import subjects

import linnet
from linnet.config.schema import DATA
from linnet.core.errors import UserError
from linnet.models import registry
from linnet.models.base import ModelFamily, TokenFamily
from linnet.models.model_config import PairModelConfig, TokenModelConfig

ROOT = Path(linnet.__file__).parent
OWN = ("models", "verify", "convert")
"""Where a family's name may be asked for: the families themselves, and the formats of one family's reference."""
SUPPORT = Path(__file__).parents[1] / "support"
CONFIGS = {"VQConfig", "MoEConfig", "PriorConfig"}


def test_registry_and_the_family_agree(subject: str, folder: Path) -> None:
    cfg = subjects.config(subject, folder)
    family = registry.get(cfg.family)
    assert isinstance(family, ModelFamily)
    assert family.name == cfg.family == registry.row_name(family.config)
    assert family.config is registry.config_class(cfg.family) is type(cfg.model)
    assert isinstance(cfg.data, DATA[family.config.READS])
    assert cfg.family in registry.names(family.config.READS)
    assert issubclass(family.config, TokenModelConfig if cfg.reads_tokens else PairModelConfig)
    assert isinstance(family, TokenFamily) == cfg.reads_tokens


def test_family_without_tokens_is_rejected_by_what_it_lacks() -> None:
    for name in registry.names():
        if registry.get(name).decoder is not None:
            assert registry.tokens(name) is registry.get(name)
            continue
        with pytest.raises(
            UserError, match=f"family is '{name}', but it must be vq or moe or toy, which read and write"
        ):
            registry.tokens(name)


def test_settings_load_no_jax() -> None:
    """The config classes of all families, the settings of a run, and its flags."""
    program = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from linnet.models import registry\n"
        "registry.FAMILIES['toy'] = registry.Entry('toy.config:ToyConfig', 'toy.family:FAMILY')\n"
        "assert registry.names('tokens') == ('vq', 'moe', 'toy')\n"
        "import linnet.config.presets, linnet.cli.flags\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def asked_by_name(tree: ast.AST) -> list[int]:
    """Lines that compare a family's name with a string, or ask whether a config is that of one family."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            about_family = any(_is_family(side) for side in sides)
            strings = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
            found += [node.lineno] if about_family and strings else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            found += [node.lineno] if names & CONFIGS else []
    return found


def _is_family(node: ast.AST) -> bool:
    """`x.family`, `family`, `x["family"]` or `x.get("family")`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "family"
    if isinstance(node, ast.Name):
        return node.id == "family"
    key = (
        node.slice
        if isinstance(node, ast.Subscript)
        else node.args[0]
        if isinstance(node, ast.Call) and node.args
        else None
    )
    return isinstance(key, ast.Constant) and key.value == "family"


def test_no_code_compares_family_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in OWN
        for line in asked_by_name(ast.parse(path.read_text()))
    ]
    assert not wrong, "ask for a capability of linnet.models.base.ModelFamily instead"


def test_search_for_names_finds_them() -> None:
    for text in (
        'cfg.family == "prior"',
        'config.get("family") != "moe"',
        'card["family"] != "prior"',
        "isinstance(cfg.model, PriorConfig)",
        "isinstance(cfg.model, (VQConfig, MoEConfig))",
    ):
        assert asked_by_name(ast.parse(text)) == [1], text
    assert asked_by_name(ast.parse("a.family == b.family\nisinstance(cfg.model, TokenModelConfig)")) == []
