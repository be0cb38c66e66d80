"""The preset `quickstart` at toy size, so that what the documentation shows trains in a second."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from linnet.config import presets
from linnet.config.resolve import with_settings

SETTINGS: dict[str, Any] = {
    "model.d_model": 16,
    "model.d_k": 8,
    "model.d_v": 16,
    "model.n_code": 8,
    "model.n_layer": 1,
    "model.block_len": 16,
    "model.mem_len": 16,
    "data.sequence_len": 64,
    "data.update_len": 64,
    "optim.steps": 4,
    "optim.warmup_steps": 1,
    "train.sample_tokens": 8,
}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def use_small_quickstart(patch: pytest.MonkeyPatch) -> None:
    """Make the preset small. Settings that a page gives still replace its own."""
    description, make = presets.PRESETS["quickstart"]
    patch.setitem(presets.PRESETS, "quickstart", (description, functools.partial(with_settings, make(), SETTINGS)))
