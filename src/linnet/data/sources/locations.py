"""Resolve the data paths of a run.

A config keeps paths as they were typed and the working directory at that time (`base`), so that a run finds its data from any
working directory.
"""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from linnet.config.schema import EMBEDDED_CORPUS, EMOJI_PAIRS, DataConfig, PairsConfig, RunConfig
from linnet.core.local_path import is_remote

FIELDS = ("source", "images", "texts", "metadata", "encodings", "condition", "validation_files", "test_files")
"""Settings that name files."""
EMBEDDED = (EMBEDDED_CORPUS, EMOJI_PAIRS, "builtin")

Config = TypeVar("Config", bound=DataConfig | PairsConfig)


def resolve_paths(cfg: Config) -> Config:
    """Make relative paths that exist below `base` absolute. Other paths stay relative to the working directory."""
    base = cfg.base
    if base is None:
        return cfg
    return _map_paths(cfg, lambda path: _absolute(base, path) if _exists(base, path) else path)


def with_base(cfg: RunConfig) -> RunConfig:
    """Set `base` to the working directory, if it is not set yet and a relative path exists from here."""
    here = os.getcwd()
    if cfg.data.base is not None or not any(_exists(here, path) for path in _paths(cfg.data)):
        return cfg
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, base=here))


def without_local_paths(cfg: RunConfig) -> RunConfig:
    """Remove `base` and the paths of exported files, which are specific to this machine."""
    data, train = dataclasses.replace(cfg.data, base=None), dataclasses.replace(cfg.train, exports=())
    return dataclasses.replace(cfg, data=data, train=train)


def rebase_changed(cfg: RunConfig, before: RunConfig) -> RunConfig:
    """Make paths that were changed by flags relative to the working directory; unchanged paths keep the `base` of `before`."""
    old, new = before.data, cfg.data
    fields = [name for name in FIELDS if hasattr(new, name)]
    changed = [name for name in fields if getattr(new, name) != getattr(old, name, None)]
    if old.base is None or new.base != old.base or not changed:
        return cfg
    resolved = resolve_paths(old)
    values = {name: getattr(resolved, name) for name in fields if name not in changed}
    return dataclasses.replace(cfg, data=dataclasses.replace(new, base=None, **values))


def absolute_paths(cfg: DataConfig | PairsConfig) -> dict[str, str | list[str]]:
    """Return the absolute form of every setting that names files, for `data.json`."""
    base, resolved = cfg.base or os.getcwd(), resolve_paths(cfg)
    result: dict[str, str | list[str]] = {}
    for name in FIELDS:
        value = getattr(resolved, name, None)
        paths = list(value) if isinstance(value, tuple) else [value] if value else []
        absolute = [_absolute(base, path) for path in paths if not _is_embedded(path)]
        if absolute:
            result[name] = absolute if isinstance(value, tuple) else absolute[0]
    return result


def _map_paths(cfg: Config, change: Callable[[str], str]) -> Config:
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(cfg, name, None)
        if value:
            values[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
    return dataclasses.replace(cfg, **values)


def _paths(cfg: DataConfig | PairsConfig) -> list[str]:
    values = [getattr(cfg, name, None) or () for name in FIELDS]
    return [path for value in values for path in (value if isinstance(value, tuple) else (value,))]


def _is_embedded(path: str) -> bool:
    return path in EMBEDDED or path.startswith(("emoji-", "hf:")) or is_remote(path)


def _absolute(base: str, path: str) -> str:
    return os.path.join(base, os.path.expanduser(path))


def _exists(base: str, path: str) -> bool:
    """Return whether a relative path or glob matches something below `base`."""
    if _is_embedded(path) or os.path.isabs(os.path.expanduser(path)) or "\0" in path:
        return False
    return Path(base, path).exists() or any(True for _ in glob.iglob(path, root_dir=base, recursive=True))
