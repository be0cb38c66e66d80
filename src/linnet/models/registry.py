"""Model families by name. To add a family, add its folder and one line to `FAMILIES`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from linnet.core.errors import invalid
from linnet.models.model_config import DataKind, ModelConfig

if TYPE_CHECKING:
    from linnet.models.base import ModelFamily, TokenFamily


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a family is, each as `module:name`. Both are imported when they are first needed, so `linnet --help` loads no JAX."""

    config: str
    """The config class, whose module must not import JAX."""
    family: str
    """The `ModelFamily`."""


FAMILIES: dict[str, Entry] = {
    "vq": Entry("linnet.models.vq.config:VQConfig", "linnet.models.vq.family:FAMILY"),
    "moe": Entry("linnet.models.moe.config:MoEConfig", "linnet.models.moe.family:FAMILY"),
    "prior": Entry("linnet.models.prior.config:PriorConfig", "linnet.models.prior.family:FAMILY"),
}


def config_class(name: str) -> type[ModelConfig]:
    """Return the config class of a family, without loading JAX."""
    return _import_object(_entry(name).config)


def get(name: str) -> ModelFamily:
    return _import_object(_entry(name).family)


def tokens(name: str) -> TokenFamily:
    """Return a family of token models; raise for others."""
    from linnet.models.base import TokenFamily

    family = get(name)
    if not isinstance(family, TokenFamily):
        needs = f"{' or '.join(names('tokens'))}, which read and write tokens"
        raise invalid("family", name, needs, "use a run of such a family")
    return family


def names(reads: DataKind | None = None) -> tuple[str, ...]:
    """Return the names of all families, or of those that are trained on data of this kind."""
    return tuple(name for name in FAMILIES if reads in (None, config_class(name).READS))


def row_name(config: type[ModelConfig]) -> str:
    """Return the name of the family with this config class."""
    return next(name for name in FAMILIES if config_class(name) is config)


def _entry(name: object) -> Entry:
    if not isinstance(name, str) or name not in FAMILIES:  # a config file may hold anything
        raise invalid("family", name, f"one of {', '.join(FAMILIES)}", "choose one of them")
    return FAMILIES[name]


def _import_object(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
