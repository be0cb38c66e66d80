"""Import a downloaded Grok-1 model, in any supported form, as a weights-only run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from linnet.config import presets
from linnet.config.schema import DataConfig, RunConfig
from linnet.convert.grok.checkpoint import checkpoint_files, find_folder, read_checkpoint
from linnet.convert.grok.hf import conversion_files, is_conversion, read_conversion
from linnet.convert.grok.import_plan import ImportPlan, plan_from_config, plan_from_files
from linnet.convert.grok.leaves import Tensors, to_leaves
from linnet.convert.grok.settings import find_settings, grok_config
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError
from linnet.models.moe.config import MoEConfig
from linnet.runs.weights import write_stored_run

MAX_SEQUENCE_LEN = 2048  # tokens per sequence in evaluation and training, if the context allows it


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrokSource:
    """Everything known before any tensor is read."""

    cfg: MoEConfig
    settings: Path | None
    """File of the model sizes; None for the published ones."""
    tensors: Tensors
    files: list[Path]
    transposed: bool
    """Whether matrices are stored as [outputs, inputs]."""


def find_grok(path: Path, settings: Path | None) -> GrokSource:
    settings = settings or find_settings(path)
    cfg, folder = grok_config(settings), find_folder(path)
    if folder is not None:
        tensors = read_checkpoint(folder, cfg)
        return GrokSource(cfg=cfg, settings=settings, tensors=tensors, files=checkpoint_files(folder), transposed=False)
    if is_conversion(path):
        tensors = read_conversion(path, cfg)
        return GrokSource(cfg=cfg, settings=settings, tensors=tensors, files=conversion_files(path), transposed=True)
    raise UserError(
        f"{path} contains no Grok-1 checkpoint. Fix: name the folder with ckpt-0 (files tensorNNNNN_SSS), a .safetensors file, or a "
        "folder with model.safetensors or model.safetensors.index.json."
    )


def plan_import(path: Path | None, settings: Path | None, weights: WeightDtype) -> ImportPlan:
    if path is None:
        return plan_from_config(grok_config(settings))
    found = find_grok(path, settings)
    return plan_from_files(found.cfg, found.tensors, found.files, weights, found.transposed)


def run_config(model: MoEConfig, source: str | None) -> RunConfig:
    length = min(MAX_SEQUENCE_LEN, model.context)
    data = DataConfig(sequence_len=length, update_len=length, batch_size=1)
    if source is not None:
        data = dataclasses.replace(data, source=source)
    return dataclasses.replace(presets.get("grok-1"), model=model, data=data)


def import_grok(
    found: GrokSource,
    cfg: RunConfig,
    out: Path,
    weights: WeightDtype,
    *,
    finish: Callable[[Path], None],
    log: Callable[[str], None],
) -> None:
    write_stored_run(out, cfg, to_leaves(found.tensors, found.cfg, weights), finish, log)
