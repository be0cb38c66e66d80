"""Reject object-store locations and other URLs where a path is expected.

Without this check `s3://bucket/run` would be read as a local folder named `s3:`.
"""

from __future__ import annotations

import re
import typing
from pathlib import PurePath
from typing import Annotated, Any

from linnet.core.errors import invalid


class _NeverAPath:
    """Type annotation marker of `FreeText`."""


FreeText = Annotated[str, _NeverAPath()]
"""Type of a setting that is never used as a path and may therefore contain a URL. All other strings are checked."""

# pathlib turns `s3://bucket` into `s3:/bucket`. One letter is a drive, not a scheme. `NAME=` precedes a run of `linnet serve`.
_TEXT = re.compile(r"(?:[^/=]*=)?([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


def is_free_text(hint: Any) -> bool:
    """Return whether a setting of this type (possibly optional, or a tuple) is marked as free text."""
    marked = any(isinstance(mark, _NeverAPath) for mark in getattr(hint, "__metadata__", ()))
    return marked or any(is_free_text(part) for part in typing.get_args(hint))


def is_remote(value: str | PurePath) -> bool:
    return _match(value) is not None


def check_local(field: str, value: str | PurePath) -> None:
    """Raise if `value` is a URL. A local path that resembles one can be given as an absolute path."""
    found = _match(value)
    if found is None:
        return
    scheme = found[1].lower()
    slashes = ":///" if scheme == "file" else "://"
    shown = str(value).replace(":/", slashes, 1) if isinstance(value, PurePath) else value
    needs = f"a path on this machine ({scheme}:// locations are not supported)"
    raise invalid(field, shown, needs, _fix(scheme))


def _match(value: str | PurePath) -> re.Match[str] | None:
    return (_PATH if isinstance(value, PurePath) else _TEXT).match(str(value))


def _fix(scheme: str) -> str:
    if scheme == "file":
        return "write the path without file://"
    if scheme == "hf":
        return (
            "use a local path; `linnet data prepare hf:OWNER/NAME --out DIR` fetches a dataset of the Hugging Face hub"
        )
    return "use a local path, and copy the files from or to the remote location with its own tool"
