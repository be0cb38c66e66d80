"""The network of a prior's reference file, as the release that wrote the file defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import from_reference
from linnet.models.prior.params import PriorParams
from linnet.models.prior.reference import network_config
from linnet.models.prior.releases import behaviour
from linnet.verify.golden import Golden


def release_version(golden: Golden) -> str | None:
    """Return the release that computed the file; None if it is not stated."""
    version = golden.meta.get("version", golden.arrays.get("out/version"))
    return None if version is None else str(np.asarray(version)[()])


def settings_group(golden: Golden, name: str) -> dict[str, Any]:
    """Return an object of the meta, or of its config."""
    group = golden.meta.get(name, golden.settings.get(name))
    if not isinstance(group, dict):
        raise UserError(
            f"{golden.path}: its meta has no object {name!r}, which a {golden.kind} file needs. Fix: write it again."
        )
    return group


def load_model(
    golden: Golden, settings: Mapping[str, Any], weights: str = "params/", **more: Any
) -> tuple[PriorConfig, PriorParams]:
    """Load the network with the config for the release that the file names, else for the newest."""
    version = release_version(golden)
    try:
        cfg = network_config(settings, **{**({} if version is None else behaviour(version)), **more})
    except TypeError as error:
        raise UserError(
            f"{golden.path}: its settings are not those of a network ({error}). Fix: write it again."
        ) from None
    return cfg, from_reference(golden.below(weights), cfg)
