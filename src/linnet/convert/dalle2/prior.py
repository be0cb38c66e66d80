"""Read checkpoints of DALLE2-pytorch's diffusion prior: find the weights in a file, and infer the model config."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from linnet.convert.torch_pickle import Inert, read_torch
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import from_reference
from linnet.models.prior.params import PriorParams
from linnet.models.prior.reference import infer_config
from linnet.models.prior.releases import Release, check_certain, check_settings, recognize

Which = Literal["ema", "online"]
NETWORK, NOISE = "net.", "noise_scheduler."
QUERY = "learned_query"  # every network has one
MAX_NUMBER = 1e15
"""Larger than any count of steps or samples."""
MAX_TIMESTEPS = 1_000_000
NAME = re.compile(r"[A-Za-z0-9_.]{1,120}")
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}[a-z0-9.+-]{0,20}")
MAX_VERSION_PARTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportedPrior:
    cfg: PriorConfig
    params: PriorParams
    which: Which
    """Whether these are the averaged weights or the trained ones."""
    other: PriorParams | None
    """The other of the two, if the file has both."""
    release: Release
    """Release of the reference that the network corresponds to."""
    facts: dict[str, Any]
    """Metadata of the file: version, step, epoch, samples_seen, best_validation_loss."""
    content: Mapping[str, Any]
    """The complete content of the file, as views."""


def read_prior_checkpoint(
    path: Path, settings: Mapping[str, Any] | None = None, which: Which = "ema", release: str | None = None
) -> ImportedPrior:
    """Read a trainer's checkpoint, a bare model, or an average.

    `settings`: fields of PriorConfig that the weights do not determine (target, scale, ...). Averaged weights are preferred by
    default. `release`: release of the reference, overriding the saved one.
    """
    loaded = read_torch(path)
    states = find_states(loaded, path)
    taken: Which = which if which in states else next(iter(states))
    prior = states[taken]
    facts, network = _read_metadata(loaded), _network_weights(prior, path)
    of = recognize(network, version=facts.get("version"), keys=filter(_is_text, loaded), override=release)
    # Before 0.11.0 the schedule's tables were at the top level of the state dict.
    noise = prior.get(NOISE + "betas", prior.get("betas"))
    cfg = infer_config(network, _check_table(noise, path), settings or {}, of)
    known = {"self_cond": cfg.self_cond, "has_version": release is not None or "version" in facts}
    check_certain(of, continuous_time=cfg.continuous_time, **known)
    check_settings(of, self_cond=cfg.self_cond, objective=cfg.objective)
    others = [from_reference(_network_weights(state, path), cfg) for name, state in states.items() if name != taken]
    return ImportedPrior(
        cfg=cfg,
        params=from_reference(network, cfg),
        which=taken,
        other=others[0] if others else None,
        release=of,
        facts=facts,
        content=loaded,
    )


def find_states(loaded: Any, path: Path) -> dict[Which, dict[str, Any]]:
    """Return the state dicts of the prior by kind, for any layout of the file."""
    if not isinstance(loaded, dict):
        raise UserError(f"{path} contains no state dict. Fix: name a checkpoint of a DALLE2-pytorch prior.")
    found: dict[Which, dict[str, Any]] = {}
    places: tuple[tuple[str, Which], ...] = (("ema_model", "ema"), ("model", "online"))
    for name, which in places:
        if isinstance(loaded.get(name), dict) and _has_network(loaded[name]):
            found[which] = loaded[name]
    if list(found) == ["online"] and "optimizer" not in loaded and "ema" not in loaded:
        found = {"ema": found["online"]}  # saved without its trainer, the reference's model is the average
    nested = loaded.get("ema")
    average = nested if isinstance(nested, dict) else loaded
    prefixes: tuple[tuple[str, Which], ...] = (("ema_model.", "ema"), ("online_model.", "online"))
    for name, which in prefixes:
        part = {
            key.removeprefix(name): x for key, x in average.items() if isinstance(key, str) and key.startswith(name)
        }
        if which not in found and _has_network(part):
            found[which] = part
    if not found and _has_network(loaded):
        found["online"] = loaded
    if not found:
        raise UserError(
            f"{path} has no weights of a diffusion prior (no '{NETWORK}{QUERY}'). "
            "Fix: name the checkpoint of a trainer, a model or an EMA."
        )
    return found


def _is_text(key: Any) -> bool:
    return isinstance(key, str)


def _has_network(state: Mapping[Any, Any]) -> bool:
    return QUERY in state or NETWORK + QUERY in state


def _network_weights(state: Mapping[str, Any], path: Path) -> dict[str, np.ndarray]:
    """Return the network's weights, without those of CLIP if they were saved together."""
    is_complete = QUERY in state
    found = {
        name.removeprefix("" if is_complete else NETWORK): x
        for name, x in state.items()
        if isinstance(name, str) and (is_complete or name.startswith(NETWORK))
    }
    size, total = path.stat().st_size, 0
    for name, value in found.items():
        shown = name if NAME.fullmatch(name) else "a weight"
        if not isinstance(value, np.ndarray):
            raise UserError(f"{path}: {shown} is not a tensor. Fix: name a checkpoint of a DALLE2-pytorch prior.")
        total += value.nbytes
        if total > size:  # tensors are views: a small file could refer to the same bytes many times
            raise UserError(f"{path}: its weights are larger than the file. Fix: download it again.")
        if not np.all(np.isfinite(value.astype(np.float32))):
            raise UserError(f"{path}: {shown} has values that are not finite. Fix: download it again.")
    return found


def _check_table(value: Any, path: Path) -> np.ndarray | None:
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or not 0 < value.size <= MAX_TIMESTEPS:
        raise UserError(f"{path}: its noise schedule is not a table. Fix: download it again.")
    return value


def _read_metadata(loaded: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("step", "epoch", "samples_seen", "best_validation_loss"):
        value = parse_number(loaded.get(name))
        if value is not None:
            facts[name] = value
    version = _parse_version(loaded.get("version"))
    return facts if version is None else {**facts, "version": version}


def parse_number(value: Any) -> int | float | None:
    """Return a count or a loss, stored as a number or a one-element tensor; None if it is implausible."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0].item()
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


def _parse_version(version: Any) -> str | None:
    """Return the version from a string or a `packaging.Version`.

    Releases of `packaging` pickle the numbers in several ways; the first tuple of integers found is the release.
    """
    todo: list[Any] = [version]
    for _ in range(MAX_VERSION_PARTS):
        if not todo:
            break
        value = todo.pop(0)
        if isinstance(value, str) and VERSION.fullmatch(value):
            return value
        if isinstance(value, tuple | list) and 1 < len(value) < 8 and all(type(n) is int for n in value):
            return ".".join(str(n) for n in value) if all(0 <= n < MAX_NUMBER for n in value) else None
        if isinstance(value, Inert):
            todo += [value.arguments, value.state]
        elif isinstance(value, tuple | list | dict):
            todo += itertools.islice(value.values() if isinstance(value, dict) else value, MAX_VERSION_PARTS)
    return None
