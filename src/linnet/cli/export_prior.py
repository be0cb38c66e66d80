"""`linnet export --format dalle2-prior | dalle2-trainer`: export a prior for DALLE2-pytorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnet.core.errors import UserError, invalid

if TYPE_CHECKING:
    from linnet.cli.convert_flags import ExportFlags
    from linnet.config.schema import RunConfig
    from linnet.runs.state import TrainState


def export_prior(flags: ExportFlags) -> int:
    from linnet.convert.torch_writer import write_torch

    out = flags.out or flags.run.with_name(flags.run.name + ".pth")
    content, step = _trainer(flags) if flags.format == "dalle2-trainer" else _model(flags)
    if out.suffix == ".safetensors":
        if flags.format == "dalle2-trainer":
            raise invalid("--out", str(out), "a .pth file: safetensors holds tensors only", "use .pth")
        _write_safetensors(out, content)
    else:
        write_torch(out, content)
    n = len(content["model"])
    print(f"Wrote {out} (step {step}; {n} tensors by the names of DALLE2-pytorch {content['version']}).")
    return 0


def _model(flags: ExportFlags) -> tuple[dict, int]:
    from linnet.convert.dalle2.export import model_file
    from linnet.runs.load import open_run

    run = open_run(flags.run, flags.checkpoint)
    return model_file(run.params, run.cfg.prior), run.step


def _trainer(flags: ExportFlags) -> tuple[dict, int]:
    from linnet.runs.load import open_state
    from linnet.runs.stored_trainer import has_trainer
    from linnet.runs.weights import is_weights_only
    from linnet.train.exports import trainer_content

    if not is_weights_only(flags.run):
        cfg, state, step = open_state(flags.run, flags.checkpoint)
    elif has_trainer(flags.run):
        cfg, state, step = _imported_trainer(flags)
    else:
        raise UserError(
            f"{flags.run} holds imported weights and was not trained, so it has no optimizer state to export. "
            "Fix: use --format dalle2-prior, or train it first."
        )
    return trainer_content(state, cfg, flags.run), step


def _imported_trainer(flags: ExportFlags) -> tuple[RunConfig, TrainState, int]:
    """Return the state from which an imported trainer checkpoint would resume."""
    from linnet.config import codec
    from linnet.convert.dalle2.export import check_optimizer
    from linnet.models import registry
    from linnet.optim.optimizer import optimizer
    from linnet.parallel import sharding
    from linnet.runs.folder import RunFolder
    from linnet.runs.stored_trainer import resume_trainer, trainer_progress

    step = trainer_progress(flags.run).step
    if flags.checkpoint not in ("best", "latest", str(step)):
        needs = f"best, latest or {step} (this run is an imported trainer checkpoint)"
        raise invalid("--checkpoint", flags.checkpoint, needs, "leave it out")
    cfg = codec.load(RunFolder(flags.run).config)
    check_optimizer(cfg.optim)
    family = registry.get(cfg.family)
    rule = optimizer(cfg.optim, family.param_specs(cfg.model))
    return cfg, *resume_trainer(flags.run, family, cfg, rule, sharding.make_mesh())


def _write_safetensors(path: Path, content: dict) -> None:
    from safetensors.numpy import save

    from linnet.core.files import atomic_write

    atomic_write(path, save(content["model"], {"format": "pt", "version": content["version"]}))
