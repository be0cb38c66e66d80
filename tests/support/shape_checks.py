"""Shape checks of the test run: jaxtyping's import hook with beartype, for every module of the package that names shapes.

Annotations that cannot be evaluated at run time are not checked: names imported for type checkers only become `Any`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import beartype
from beartype.roar import BeartypeDecorHintException
from jaxtyping import install_import_hook

F = TypeVar("F", bound=Callable[..., Any])

SOURCE = Path(__file__).parents[2] / "src"
CHECKER = f"{__name__}.check"

_VALIDATES = "validates what users give; tests pass wrong values on purpose"
UNCHECKED = {
    "linnet.api.async_client": _VALIDATES,
    "linnet.api.client": _VALIDATES,
    "linnet.api.client_calls": _VALIDATES,
    "linnet.api.client_images": _VALIDATES,
    "linnet.api.client_text": _VALIDATES,
    "linnet.api.run": _VALIDATES,
    "linnet.api.text": _VALIDATES,
    "linnet.generate.prior.given_texts": _VALIDATES,
    "linnet.generate.prior.solver_table": _VALIDATES,
    "linnet.serve.prior.request.SampleRequest.__init__": _VALIDATES,
}
"""Modules and functions that name shapes and are not checked, with the reason."""

_CONFIG = beartype.BeartypeConf(
    is_pep484_tower=True,  # an int is a float, as for type checkers
    hint_overrides=beartype.FrozenDict({IO[bytes]: Any}),  # beartype does not accept io.BytesIO as one
)
_checked = beartype.beartype(conf=_CONFIG)


def checked_modules() -> list[str]:
    """Return the modules that import jaxtyping."""
    found = (path for path in sorted(SOURCE.rglob("*.py")) if "from jaxtyping import" in path.read_text())
    names = (".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in found)
    return [name for name in names if name not in UNCHECKED]


def install() -> None:
    """Install the hook. It affects modules that are imported later, in this process."""
    install_import_hook(checked_modules(), CHECKER)


def check(function: F) -> F:
    """Check the arguments and the result of `function`, except those whose types beartype cannot check: Self and protocols."""
    if f"{function.__module__}.{function.__qualname__}" in UNCHECKED:
        return function
    try:
        return _checked(function)
    except BeartypeDecorHintException:
        for name, hint in function.__annotations__.items():
            if not _is_checkable(hint):
                function.__annotations__[name] = Any
        return _checked(function)


def _is_checkable(hint: Any) -> bool:
    def function(value: Any) -> None:
        del value

    function.__annotations__["value"] = hint
    try:
        _checked(function)
    except BeartypeDecorHintException:
        return False
    return True
