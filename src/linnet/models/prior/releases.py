"""Releases of the reference (DALLE2-pytorch): what each one's network computes, and which release a checkpoint is from.

The tensors have the same names and shapes in releases whose networks differ, so a network's behaviour is stored as settings of
`PriorConfig`. A release number is needed only here, to choose them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Literal

from linnet.core.errors import UserError, invalid

Version = tuple[int, int, int]
Family = Literal["A", "B0", "B1", "B2", "C0", "C1", "D", "E", "F"]

OLDEST, NEWEST = "0.4.0", "1.15.6"
# The first release of each family, in order. Releases in between behave like the last one before them.
FAMILIES: dict[Family, tuple[str, dict[str, Any]]] = {
    "A": (
        OLDEST,
        {"scores": "product", "last_norm": "plain", "text_conditioning": "mask", "text_mask": "given"},
    ),
    "B0": ("0.16.0", {}),
    "B1": ("0.16.1", {"bias_scale": 1024.0}),
    "B2": ("0.16.2", {"norms": "maximum", "last_norm": "maximum"}),
    "C0": ("0.23.0", {"text_conditioning": "learned_padding"}),
    "C1": ("0.23.3", {"norms": "plain", "bias_scale": 128.0}),
    "D": ("1.4.3", {"scores": "cosine", "bias_scale": 1.0}),
    "E": ("1.9.0", {"text_conditioning": "null_vectors", "drop_text_embedding": False}),
    "F": ("1.10.4", {"drop_text_embedding": True}),
}
# Changes that do not follow the families.
CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("0.16.9", {"truncated_time": True}),
    ("0.21.1", {"text_mask": "given_or_nonzero"}),
    ("0.22.0", {"text_mask": "nonzero"}),
    ("0.22.3", {"text_mask": "all"}),
    ("1.6.1", {"self_cond_layout": "last_zeros"}),
    ("1.6.2", {"self_cond_layout": "last"}),
    ("1.10.8", {"truncated_time": False}),
    ("1.12.1", {"self_cond_layout": "before_query"}),
)
NO_SELF_COND = "1.6.1"  # the first release that has the option
WRONG_VELOCITY = "1.11.0"  # the sign of its v target is wrong
FAMILY_NAMES: dict[str, tuple[Family, ...]] = {
    "gamma": ("A",),
    "neither": ("B0", "B1", "B2"),
    "null_text_embed": ("C0", "C1", "D"),
    "null_text_encodings": ("E", "F"),
}
# Assumed release of a checkpoint without a version, by its names. B0, B1 and C0 were the newest for hours only, and C0 cannot be
# trained (its backward pass fails); trainer checkpoints, and the tracker's since 0.26.2, have a version.
WITHOUT_VERSION = {"gamma": "0.15.4", "neither": "0.22.1", "null_text_embed": "0.26.1", "null_text_encodings": NEWEST}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    version: str
    family: Family
    settings: dict[str, Any]
    """Fields of `PriorConfig`."""
    source: str
    """How the release was determined, for messages."""


def parse(version: str) -> Version:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    if found is None:
        needs = f"a release of DALLE2-pytorch, {OLDEST} to {NEWEST}"
        raise invalid("the release", version, needs, "name the release that trained it with --release, as in 1.4.2")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def family_of(version: str) -> Family:
    """Return the family of a release. Releases before the oldest known one are treated like it."""
    at = parse(version)
    found: Family = "A"
    for family, (first, _) in FAMILIES.items():
        if parse(first) <= at:
            found = family
    return found


def behaviour(version: str) -> dict[str, Any]:
    """Return the `PriorConfig` settings that describe what this release's network computes."""
    at = parse(version)
    found = dict(FAMILIES["A"][1])
    for first, changes in (*FAMILIES.values(), *CHANGES):
        if parse(first) <= at:
            found |= changes
    if found["text_conditioning"] != "mask":
        del found["text_mask"]
    return found


def kind_of_names(names: Iterable[str]) -> str:
    """Classify the parameter names: returns a key of FAMILY_NAMES."""
    names = set(names)
    if any(name.endswith(".gamma") for name in names):
        return "gamma"
    return next((name for name in ("null_text_encodings", "null_text_embed") if name in names), "neither")


def check_names(version: str, names: Iterable[str], source: str) -> Family:
    """Return the family of a release, or raise an error if its networks have other weight names."""
    kind, family = kind_of_names(names), family_of(version)
    if family not in FAMILY_NAMES[kind]:
        fitting = FAMILY_NAMES[kind]
        raise invalid(
            "the release",
            f"{version} ({source})",
            f"{span(fitting[0], fitting[-1])}: the names of the weights are those of these releases",
            "name the release that trained it with --release",
        )
    return family


def span(first: Family, last: Family) -> str:
    """Describe the releases of these families in text."""
    families = list(FAMILIES)
    after = families[families.index(last) + 1 :]
    return f"{FAMILIES[first][0]} or later" + (f" and before {FAMILIES[after[0]][0]}" if after else "")


def recognize(
    names: Iterable[str], *, version: str | None = None, keys: Iterable[str] = (), override: str | None = None
) -> Release:
    """Determine the release of a checkpoint: overridden, saved, or inferred from its weight names and the file's top-level `keys`."""
    names = list(names)
    given, source = (override, "--release") if override is not None else (version, "saved in the file")
    if given is None:
        given = _dated(kind_of_names(names), set(keys))
        source = "no version is saved; taken from the names of the weights"
    family = check_names(given, names, source)
    return Release(version=given, family=family, settings=behaviour(given), source=source)


def _dated(kind: str, keys: set[str]) -> str:
    """Infer the release from the file's keys. Trainer checkpoints have `scaler` before 1.0.1, then `warmup_scheduler`, and `scheduler`
    too since 1.8.1."""
    if kind == "null_text_embed" and "warmup_scheduler" in keys:
        if "scheduler" not in keys:
            raise UserError(
                "the file names no release, and its parts are those of 1.0.1 to 1.8.0, which compute two different things with "
                "these weights. Fix: name the release that trained it, with --release 1.4.2 (any of 1.0.1 to 1.4.2) or --release "
                "1.4.3 (any of 1.4.3 to 1.8.0)."
            )
        return "1.8.4"
    return WITHOUT_VERSION[kind]


def check_certain(release: Release, *, has_version: bool, continuous_time: bool, self_cond: bool) -> None:
    """Raise an error if no version is known and releases of the family differ for these settings."""
    if has_version:
        return
    if continuous_time and release.family == "B2":
        raise _unknown("its time is continuous, whose embedding changed in 0.16.9", "0.16.8 or --release 0.22.1")
    if continuous_time and release.family == "F":
        raise _unknown("its time is continuous, whose embedding changed in 1.10.8", f"1.10.7 or --release {NEWEST}")
    if self_cond and release.family == "F":
        raise _unknown("it is self-conditioned, whose tokens changed in 1.12.1", f"1.12.0 or --release {NEWEST}")


def check_settings(release: Release, *, self_cond: bool, objective: str) -> None:
    """Raise an error for settings that the release did not have or computed wrongly."""
    at = parse(release.version)
    if self_cond and at < parse(NO_SELF_COND):
        needs = f"off: {release.version} has no self-conditioning (it came with {NO_SELF_COND})"
        raise invalid("model.self_cond", True, needs, "leave it out, or name another --release")
    if objective == "v" and at == parse(WRONG_VELOCITY):
        needs = (
            f"x_start or noise: release {WRONG_VELOCITY} trained predict_v towards a target with a wrong sign, from which an "
            "embedding cannot be recovered"
        )
        raise invalid("model.objective", "v", needs, "train it again with a later release, or name another --release")


def _unknown(why: str, choices: str) -> UserError:
    return UserError(
        f"the file names no release of DALLE2-pytorch, and {why}, so what it computes is ambiguous. "
        f"Fix: name the release that trained it, with --release {choices}."
    )
