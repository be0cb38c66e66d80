"""The config of a fine-tuned run. A run that has started keeps its own config, and no longer needs its parent."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from linnet.config import codec
from linnet.config.schema import RunConfig
from linnet.core.errors import UserError, invalid
from linnet.parallel.cluster.environment import ALONE, find_cluster_env
from linnet.train.finetune_config import tuned_config
from linnet.train.finetune_data import with_encoded_text
from linnet.train.parent import find_origin


def default_out(path: Path) -> Path:
    return Path("runs") / f"{path.absolute().stem}-tuned"


def started_config(out: Path, path: Path) -> RunConfig | None:
    """Return the config of the run in the folder, if there is one; it must have the same parent."""
    if not (out / "config.json").is_file():
        return None
    if out.absolute() == path.absolute():
        raise UserError(
            f"--out is {out}, the run to start from, and nothing is overwritten. Fix: choose another --out."
        )
    found = codec.load(out / "config.json")
    if found.parent is not None and found.parent.path == str(path.absolute()):
        return found
    came = "random or imported weights" if found.parent is None else found.parent.path
    raise UserError(
        f"{out} holds a run that was started from {came}, not from {path}, and nothing is overwritten. Fix: choose another --out, or "
        f"continue that run with `linnet train {out}`."
    )


def new_config(path: Path, checkpoint: str, *, steps: int | None, lora: bool, other_data: bool) -> RunConfig:
    """Return the default config of a run that is fine-tuned from the run or file in `path`."""
    origin = find_origin(path, checkpoint)
    return tuned_config(origin.cfg, origin.parent(), steps=steps, lora=lora, other_data=other_data)


def complete_config(
    config: RunConfig, out: Path, *, is_new: bool, checkpoint: str, keep_optimizer: bool, log: Callable[[str], None]
) -> RunConfig:
    """Return the config to train with, after all settings were applied. Plain text is encoded with the model's own tokenizer, except
    with several processes, which would write the same files: they need prepared data."""
    assert config.parent is not None
    if is_new:
        config = dataclasses.replace(config, parent=dataclasses.replace(config.parent, optimizer=keep_optimizer))
    elif keep_optimizer and not config.parent.optimizer:
        raise invalid(
            "--keep-optimizer", True, f"as when {out} was started: left out", "leave it out, or choose another --out"
        )
    elif checkpoint.isdecimal() and int(checkpoint) != config.parent.step:
        needs = f"{config.parent.step}, which {out} was started from"
        raise invalid("--checkpoint", checkpoint, needs, "leave it out, or choose another --out")
    return config if find_cluster_env(os.environ) != ALONE else with_encoded_text(config, out, log)
