"""Model families by name."""

from __future__ import annotations

import importlib
from typing import Any, cast

from linnet.core.errors import invalid
from linnet.models.base import ModelFamily, TokenFamily

TOKENS = ("vq", "moe")
ALL = (*TOKENS, "prior")


def get(name: str) -> ModelFamily:
    """Import and return a family. The import is lazy so that `linnet --help` does not load JAX."""
    if name not in ALL:
        raise invalid("family", name, f"one of {', '.join(ALL)}", "use one of them")
    return cast(ModelFamily, cast(Any, importlib.import_module(f"linnet.models.{name}.family")))


def tokens(name: str) -> TokenFamily:
    """Return a family of token models."""
    if name not in TOKENS:
        raise invalid(
            "family", name, f"{' or '.join(TOKENS)}, which read and write tokens", "use a run of such a family"
        )
    return cast(TokenFamily, get(name))
