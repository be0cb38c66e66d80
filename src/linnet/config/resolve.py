"""The config that a run starts from: a preset, a config file or an existing run, and settings that replace its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from linnet.config import codec, presets
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.core.local_path import check_local


def base_config(name: str) -> RunConfig:
    """Return the config of a preset, a config.json or a run folder."""
    check_local("PRESET or RUN", name)
    path = Path(name)
    if path.suffix == ".json":
        return codec.load(path)
    if (path / "config.json").is_file():
        return codec.load(path / "config.json")
    if name not in presets.PRESETS and path.exists():
        raise UserError(_no_run(path))
    return presets.get(name)


def _no_run(path: Path) -> str:
    """Return the message for a path that exists but is not a run."""
    on_it = f"to train on it as data, `linnet train PRESET --data.source {path}`"
    if not path.is_dir():
        return f"{path} is a file, and neither a preset nor a run. Fix: {on_it}; a config file's name ends in .json."
    return (
        f"{path} is a folder, but not a run: it has no config.json. Fix: name a folder made by `linnet train`; {on_it}."
    )


def with_settings(cfg: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return the config with some settings replaced. Names are dotted, as in `{"optim.steps": 100}`, or mappings are nested."""
    values = codec.to_json(cfg)
    del values["version"]
    for name, value in flat_settings(settings):
        *parts, last = name.split(".")
        place: Any = values
        for i, part in enumerate(parts):
            place = place.get(part) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                needs = f"a setting of the run ({'.'.join(parts[: i + 1])!r} is none)"
                raise invalid("a setting", name, needs, "see config.json of any run")
        place[last] = str(value) if isinstance(value, PurePath) else value
    return codec.run_from_dict(values)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and their values."""
    for name, value in settings.items():
        whole = f"{prefix}{name.replace('-', '_')}"
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{whole}.")
        else:
            yield whole, value
