"""The training loop, its tasks, resuming and fine-tuning.

The package shares its name with the function `linnet.train` of the Python API. Python sets a package's attribute to a subpackage when
that is imported, so this one can be called as well: `linnet.train(...)` is the function whether or not the package was imported.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function())


def _function() -> Any:
    # By name, because the API is above this package in the import order.
    return importlib.import_module("linnet.api.training").train


sys.modules[__name__].__class__ = _CallablePackage
