"""Linnet: linear-time networks, trained and served exactly.

The names below are the public Python API; `docs/python.md` describes them. They are imported on first use, so that `import linnet`
loads neither JAX nor any model code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from linnet.core.errors import LinnetError, UserError
from linnet.core.version import __version__

if TYPE_CHECKING:
    from linnet.api.async_client import AsyncClient, AsyncRemoteSession
    from linnet.api.client import Client, RemoteSession
    from linnet.api.client_http import ServerConnectionError, ServerError
    from linnet.api.evaluation import EvaluationResult
    from linnet.api.images import EmbeddingSamples, Images, Neighbor
    from linnet.api.imagine import imagine
    from linnet.api.load import load
    from linnet.api.results import GeneratedText, Score
    from linnet.api.run import Run
    from linnet.api.session import Session
    from linnet.api.training import TrainingResult, train

__all__ = [
    "AsyncClient",
    "AsyncRemoteSession",
    "Client",
    "EmbeddingSamples",
    "EvaluationResult",
    "GeneratedText",
    "Images",
    "LinnetError",
    "Neighbor",
    "RemoteSession",
    "Run",
    "Score",
    "ServerConnectionError",
    "ServerError",
    "Session",
    "TrainingResult",
    "UserError",
    "__version__",
    "imagine",
    "load",
    "train",
]

_HOME = {
    "AsyncClient": "linnet.api.async_client",
    "AsyncRemoteSession": "linnet.api.async_client",
    "Client": "linnet.api.client",
    "EmbeddingSamples": "linnet.api.images",
    "EvaluationResult": "linnet.api.evaluation",
    "GeneratedText": "linnet.api.results",
    "Images": "linnet.api.images",
    "Neighbor": "linnet.api.images",
    "RemoteSession": "linnet.api.client",
    "Run": "linnet.api.run",
    "Score": "linnet.api.results",
    "ServerConnectionError": "linnet.api.client_http",
    "ServerError": "linnet.api.client_http",
    "Session": "linnet.api.session",
    "TrainingResult": "linnet.api.training",
    "imagine": "linnet.api.imagine",
    "load": "linnet.api.load",
}
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    if name == "train":  # the package, which can be called: importing it sets this attribute in any case
        return importlib.import_module("linnet.train")
    if name not in _HOME:
        raise AttributeError(f"module 'linnet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
