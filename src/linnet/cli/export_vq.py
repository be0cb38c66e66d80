"""`linnet export --format transformer-vq`: export a run as a checkpoint of the official code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.core.errors import UserError
from linnet.core.files import atomic_write

if TYPE_CHECKING:
    from linnet.config.schema import RunConfig


def export_vq(run: Path, out: Path | None, checkpoint: str, *, npz: bool) -> int:
    if npz or (out is not None and out.suffix == ".npz"):
        return _npz(run, out or run.with_name(f"{run.name}.npz"), checkpoint)
    return _flax(run, out, checkpoint)


def _npz(run: Path, out: Path, checkpoint: str) -> int:
    import numpy as np

    from linnet.convert.npz import write_npz
    from linnet.models.vq.convert import to_reference
    from linnet.runs.load import open_run

    opened = open_run(run, checkpoint)
    cfg = opened.cfg
    meta = {"family": "vq", "kind": "params", "config": {**dataclasses.asdict(cfg.model), **_lengths(cfg)}}
    write_npz(out, {**to_reference(opened.params, opened.buffers, cfg.vq), "meta": np.array(json.dumps(meta))})
    print(f"Wrote {out} (step {opened.step}).")
    return 0


def _flax(run: Path, out: Path | None, checkpoint: str) -> int:
    import numpy as np

    from linnet.convert.flax import nest, write_flax
    from linnet.convert.transformer_vq_optim import from_opt_state
    from linnet.convert.transformer_vq_settings import settings_beside
    from linnet.models.vq.convert import to_reference
    from linnet.runs import weights as stored_weights
    from linnet.runs.load import open_run, open_state
    from linnet.runs.state import model_weights

    if stored_weights.is_weights_only(run):
        opened = open_run(run, checkpoint)
        cfg, params, buffers, step, opt_state = opened.cfg, opened.params, opened.buffers, opened.step, None
        is_ema = False
    else:
        cfg, state, step = open_state(run, checkpoint)
        (params, buffers), is_ema = model_weights(state), state.ema is not None
        opt_state = None if cfg.lora.rank else state.opt_state  # LoRA: it belongs to adapters, which are merged here
    tree = nest(to_reference(params, buffers, cfg.vq))
    states, remarks = from_opt_state(opt_state, cfg.optim, cfg.vq)
    if is_ema and opt_state is not None:
        remarks.append("The weights are the EMA weights; the optimizer state belongs to the online weights.")
    file = out or run.with_name(f"{run.name}-transformer-vq") / f"checkpoint_{step}"
    file = file / f"checkpoint_{step}" if file.is_dir() else file
    beside = settings_beside(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_flax(file, {"step": np.asarray(step, np.int32), "params": tree, "opt_state": states})
        atomic_write(beside, (json.dumps({"config": _settings(cfg)}, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror or error}). Fix: name another file with --out."
        ) from None
    for remark in remarks:
        print(remark)
    print(f"Wrote {file} (step {step}), and launch.py's arguments to {beside}.")
    return 0


def _settings(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments for launch.py. Settings that the official code lacks are omitted if they have their default value."""
    from linnet.config.schema import OptimConfig
    from linnet.convert.transformer_vq_settings import GROUPED, OPTIM
    from linnet.models.vq.config import VQConfig

    own = {f.name: f.default for f in dataclasses.fields(VQConfig) if f.name not in OFFICIAL}
    model = {name: value for name, value in dataclasses.asdict(cfg.model).items() if own.get(name) != value}
    switches = {name: int(value) for name, value in model.items() if isinstance(value, bool)}
    optim = {theirs: getattr(cfg.optim, ours) for theirs, ours in OPTIM.items()}
    if cfg.optim.name == "muon":
        optim["optimizer"] = "adamw"  # the file has a fresh state of it
    if cfg.optim.decay_vectors != OptimConfig.decay_vectors:
        optim[GROUPED] = False
    return {"global_batch_size": cfg.data.batch_size, **_lengths(cfg), **model, **switches, **optim}


OFFICIAL = frozenset(
    [
        "n_vocab",
        "d_model",
        "d_k",
        "d_v",
        "n_head",
        "n_code",
        "n_layer",
        "block_len",
        "mem_len",
        "agg_cache",
        "grad_thru_cache",
        "pe_abs",
        "pe_lam",
        "p_dropemb",
        "p_dropsin",
        "p_dropres",
        "p_droplyr",
        "e_tie",
        "e_preln",
        "e_scale",
        "c_beta",
        "c_gamma",
        "dtype",
    ]
)
"""Model settings that launch.py has too."""


def _lengths(cfg: RunConfig) -> dict[str, int]:
    return {"sequence_len": cfg.tokens.sequence_len, "update_len": cfg.tokens.update_len}
