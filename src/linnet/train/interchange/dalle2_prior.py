"""Checkpoints of the reference's diffusion prior: which weights a file holds, and the model that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from linnet.errors import UserError
from linnet.families.prior.config import PriorConfig
from linnet.families.prior.convert import from_reference
from linnet.families.prior.params import PriorParams
from linnet.families.prior.reference import infer_config
from linnet.train.interchange.torch_file import Inert, read_torch

Which = Literal["ema", "online"]
NETWORK, NOISE = "net.", "noise_scheduler."
MARK = "learned_query"  # every network has one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportedPrior:
    cfg: PriorConfig
    params: PriorParams
    which: Which
    """Whether these are the averaged weights or the trained ones."""
    other: PriorParams | None
    """The other of the two, where the file has both."""
    facts: dict[str, Any]
    """What else it tells: version, step, epoch, samples_seen, best_validation_loss."""


def read_prior_checkpoint(path: Path, settings: Mapping[str, Any] | None = None, which: Which = "ema") -> ImportedPrior:
    """A trainer's checkpoint, a bare model, or an average by itself. `settings`: what weights do not tell (target, scale, ...), as
    fields of PriorConfig. Averaged weights are taken where there are any."""
    loaded = read_torch(path)
    states = find_states(loaded, path)
    taken: Which = which if which in states else next(iter(states))
    prior = states[taken]
    cfg = infer_config(_network(prior, path), prior.get(NOISE + "betas"), settings or {})
    others = [from_reference(_network(state, path), cfg) for name, state in states.items() if name != taken]
    return ImportedPrior(
        cfg=cfg,
        params=from_reference(_network(prior, path), cfg),
        which=taken,
        other=others[0] if others else None,
        facts=_facts(loaded),
    )


def find_states(loaded: Any, path: Path) -> dict[Which, dict[str, Any]]:
    """State dicts of the prior by what they are, whatever the file's layout."""
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no state dict. Fix: name a checkpoint of a DALLE2-pytorch prior.")
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
            f"{path} has no weights of a diffusion prior (no '{NETWORK}{MARK}'). "
            "Fix: name a trainer's checkpoint, a model's, or its average's."
        )
    return found


def _has_network(state: Mapping[Any, Any]) -> bool:
    return MARK in state or NETWORK + MARK in state


def _network(state: Mapping[str, Any], path: Path) -> dict[str, np.ndarray]:
    """The network's part. CLIP's weights, where a prior was saved with them, are none of it."""
    whole = MARK in state
    found = {
        name.removeprefix("" if whole else NETWORK): x
        for name, x in state.items()
        if isinstance(name, str) and (whole or name.startswith(NETWORK))
    }
    for name, value in found.items():
        if not isinstance(value, np.ndarray):
            raise UserError(f"{path}: {name} is no tensor. Fix: name a checkpoint of a DALLE2-pytorch prior.")
        if not np.all(np.isfinite(value.astype(np.float32))):
            raise UserError(f"{path}: {name} has values that are not finite. Fix: download it again.")
    return found


def _facts(loaded: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("step", "epoch", "samples_seen", "best_validation_loss"):
        value = loaded.get(name)
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(-1)[0].item()
        if isinstance(value, int | float):
            facts[name] = value
    version = loaded.get("version")
    if isinstance(version, Inert):
        found = _version(version)
        facts |= {"version": found} if found else {}
    elif isinstance(version, str):
        facts["version"] = version
    return facts


def _version(version: Inert) -> str | None:
    """packaging has stored its numbers in several ways: the first run of whole numbers is the release."""
    stack: list[Any] = [version.arguments, version.state]
    while stack:
        value = stack.pop(0)
        if isinstance(value, str) and value[:1].isdigit():
            return value
        if isinstance(value, tuple | list) and value and all(type(n) is int for n in value) and len(value) > 1:
            return ".".join(map(str, value))
        if isinstance(value, Inert):
            stack += [value.arguments, value.state]
        if isinstance(value, tuple | list):
            stack += list(value)
        if isinstance(value, dict):
            stack += list(value.values())
    return None
