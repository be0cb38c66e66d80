"""JSON serialization of configs: strict reading, writing, and reading configs of earlier versions.

pydantic does not read them: every config class would have to import it to be strict, which doubles the import time of the configs
(0.11 s to 0.23 s), the class of `model` depends on another field, and its errors would have to be translated to name the fix.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from linnet.config.schema import DATA, RunConfig
from linnet.core.errors import UserError, invalid
from linnet.core.files import atomic_write, read_json
from linnet.models import registry
from linnet.models.model_config import ModelConfig

CONFIG_VERSION = 1


IMPORTED_WEIGHTS = Path("weights/index.json")
"""Path, relative to the run folder, that exists if the run's weights were imported."""


def to_json(cfg: Any) -> dict[str, Any]:
    return {"version": CONFIG_VERSION, **dataclasses.asdict(cfg)}


def save(cfg: RunConfig, path: Path) -> None:
    atomic_write(path, (json.dumps(to_json(cfg), indent=2) + "\n").encode(), sync=True)


def load(path: Path) -> RunConfig:
    """Load the config of a run. Unknown fields and wrong types are errors, so that a run is reproduced exactly or not at all."""
    try:
        values = read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist, so this is not a run. Fix: name a folder made by `linnet train`."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}). Fix: make it readable.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). Fix: restore it, or train again.") from None
    version = values.pop("version", None) if isinstance(values, dict) else None
    if version != CONFIG_VERSION:
        raise invalid(f"version of {path}", version, str(CONFIG_VERSION), "use the Linnet that made this run")
    if _is_released_grok(values) and _is_untrained_import(path.parent):
        values = _with_begin(values, None)
    return run_from_dict(values)


def run_from_dict(values: dict[str, Any]) -> RunConfig:
    """Make a config from JSON values without the version."""
    family = values.get("family", "vq")  # configs from before there were several families have no such field
    model = registry.config_class(family)
    return from_dict(RunConfig, _older(values, model), "", {"model": model, "data": DATA[model.READS]})


def _older(values: dict[str, Any], cls: type[ModelConfig]) -> dict[str, Any]:
    """Convert the settings of earlier versions to the current schema."""
    model = values.get("model")
    if not isinstance(model, dict):
        return values
    if isinstance(model.get("remat"), bool):
        model = model | {"remat": "full" if model["remat"] else "none"}
    return values | {"model": cls.from_older(model)}


def exported_from_dict(values: dict[str, Any]) -> RunConfig:
    """Make a config from the values in an exported file, without the version."""
    return run_from_dict(_with_begin(values, None) if _is_released_grok(values) else values)


def _is_released_grok(values: dict[str, Any]) -> bool:
    """Return whether this is an import of Grok-1 from before the BOS setting existed. The release expects prompts without BOS."""
    model = values.get("model")
    return values.get("preset") == "grok-1" and isinstance(model, dict) and "begin_id" not in model


def _is_untrained_import(run: Path) -> bool:
    """Return whether the run has imported weights and no checkpoint. A run trained since then used EOS as BOS, and keeps it."""
    return (run / IMPORTED_WEIGHTS).is_file() and not any((run / "checkpoints").glob("[0-9]*"))


def _with_begin(values: dict[str, Any], begin_id: int | None) -> dict[str, Any]:
    return values | {"model": values["model"] | {"begin_id": begin_id}}


def from_dict(cls: type, values: Any, where: str, known: dict[str, type] | None = None) -> Any:
    """Make a frozen config from JSON values. An unknown name is an error that suggests the closest known one. `known` gives the
    types of fields whose annotation is a union of configs."""
    if not isinstance(values, dict):
        raise invalid(where or "the config", values, "an object of settings", "see config.json of any run")
    fields = {field.name for field in dataclasses.fields(cls)}
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name in fields} | (known or {})
    unknown = sorted(set(values) - set(hints))
    if unknown:
        near = difflib.get_close_matches(unknown[0], hints, n=1)
        did_you_mean = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(hints)}"
        raise UserError(f"unknown setting {where}{unknown[0]!r}; {did_you_mean}")
    return cls(**{name: _coerce(hints[name], value, f"{where}{name}") for name, value in values.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, f"{where}.")
    if origin is Literal:
        if value not in args:
            raise invalid(where, value, f"one of {', '.join(map(repr, args))}", "choose one of them")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        words = [word for a in args if typing.get_origin(a) is Literal for word in typing.get_args(a)]
        if isinstance(value, str) and value in words:
            return value
        plain = [a for a in args if a is not type(None) and typing.get_origin(a) is not Literal]
        return _coerce(plain[0] if plain else next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise invalid(where, value, "a list", "write it as [..]")
        return tuple(_coerce(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    assert isinstance(hint, type), f"{where}: configs hold no {hint}"
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise invalid(where, value, f"of type {hint.__name__}", "correct its value")
    return value
