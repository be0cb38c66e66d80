"""`linnet import transformer-vq`: import a checkpoint of the official code as a run."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from linnet.core.errors import invalid

if TYPE_CHECKING:
    from pathlib import Path

    from linnet.cli.convert_flags import ImportFlags
    from linnet.config.schema import OptimConfig, RunConfig
    from linnet.convert.transformer_vq_optim import OfficialOptim
    from linnet.models.vq.config import VQConfig

# As in the paper: enwik8 with adamw, PG-19 with adafactor. The official code supports lion, which the paper does not use.
ASSUMED: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 4e-4, "warmup_steps": 10_000, "steps": 125_000, "clip": 0.1, "decay": 2e-4},
    "lion": {"lr": 4e-5, "warmup_steps": 10_000, "steps": 125_000, "clip": 0.1, "decay": 2e-4},
    "adafactor": {"lr": 0.01, "warmup_steps": 10_000, "steps": 500_000, "clip": 0.1, "decay": 2e-4},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    cfg: RunConfig
    params: Any
    buffers: Any
    step: int
    opt_state: Any
    remarks: tuple[str, ...]


def check_unused_flags(flags: ImportFlags) -> None:
    """Raise if a flag is given that only transformer-vq uses."""
    given = {"--sequence-len": flags.sequence_len, "--update-len": flags.update_len}
    given |= {f"--optim.{name.replace('_', '-')}": value for name, value in dataclasses.asdict(flags.optim).items()}
    for name, value in given.items():
        if value is not None:
            raise invalid(name, value, f"left out with {flags.kind}: it belongs to transformer-vq", "leave it out")


def import_vq(flags: ImportFlags, file: Path) -> Imported:
    from linnet.convert.transformer_vq import import_config, read_official, to_model
    from linnet.convert.transformer_vq_optim import UnsupportedOptimizer, read_optimizer, to_opt_state
    from linnet.convert.transformer_vq_settings import read_settings, settings_beside

    found = read_official(file, flags.max_unpacked_gb)
    beside = settings_beside(found.path)
    path = flags.settings or (beside if beside.is_file() else None)
    settings = {**found.settings, **({} if path is None else read_settings(path))}
    names = ("block_len", "mem_len", "pe_lam", "e_scale", "agg_cache")
    overrides = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    model = import_config(found.params, settings, overrides=overrides)
    params, buffers = to_model(found.params, model)
    remarks = [f"Read {found.path}" + (f", with the settings of {path}." if path is not None else ".")]
    optim: OfficialOptim | None = None
    if found.opt_state is None and flags.optimizer == "keep":
        raise invalid("--optimizer", "keep", f"fresh: {found.path} has no optimizer state", "leave it out")
    if found.opt_state is not None and flags.optimizer != "fresh":
        try:
            optim = read_optimizer(found.opt_state)
        except UnsupportedOptimizer as error:
            remarks.append(_describe_missing_state(error, flags))
    chosen, assumed = _optim_config(optim, settings, flags, str(path or found.path))
    cfg = _run_config(model, settings, flags, chosen)
    opt_state = None
    if optim is not None:
        try:
            opt_state = to_opt_state(optim, cfg, params)
        except UnsupportedOptimizer as error:
            remarks.append(_describe_missing_state(error, flags))
    step = 0
    if optim is not None and opt_state is not None:
        step = optim.count if found.step is None else found.step
        remarks += _describe_resume(step, optim, chosen, assumed)
    return Imported(cfg=cfg, params=params, buffers=buffers, step=step, opt_state=opt_state, remarks=tuple(remarks))


def _describe_missing_state(why: ValueError, flags: ImportFlags) -> str:
    if flags.optimizer == "keep":
        raise invalid("--optimizer", "keep", f"fresh: the state cannot be imported ({why})", "leave it out")
    return f"The optimizer state is not imported: {why}. Training would start at step 0 with a fresh optimizer."


def _describe_resume(step: int, found: OfficialOptim, chosen: OptimConfig, assumed: list[str]) -> list[str]:
    remarks = [
        f"`linnet train` continues at step {step} with the state of {found.rule}, on the data of --source in Linnet's order."
    ]
    if assumed:
        values = ", ".join(f"{name} {getattr(chosen, name)}" for name in assumed)
        wanted = " ".join(f"--optim.{name.replace('_', '-')}" for name in assumed)
        remarks.append(
            f"Assumed, because the file does not contain it: {values}. To continue with its own settings, import it with --settings "
            f"FILE.json (launch.py's arguments) or {wanted}."
        )
    if chosen.schedule == "inv_sqrt":
        remarks.append(
            "The official inv_sqrt schedule rises without bound; Linnet's falls with the inverse square root."
        )
    return remarks


def _optim_config(
    found: OfficialOptim | None, settings: dict[str, Any], flags: ImportFlags, where: str
) -> tuple[OptimConfig, list[str]]:
    """Return the optimizer config, and the names of settings that had to be assumed."""
    from linnet.config.schema import OptimConfig
    from linnet.convert.transformer_vq_settings import optim_config, optim_values

    given = {name: value for name, value in dataclasses.asdict(flags.optim).items() if value is not None}
    stated = {**optim_values(settings, where), **given}
    if found is None:
        return (optim_config(stated, where) if stated else OptimConfig()), []
    if stated.get("name", found.rule) != found.rule:
        needs = f"{found.rule}, whose state the checkpoint holds"
        raise invalid(
            f"the setting optimizer in {where}", stated["name"], needs, "correct it, or add --optimizer fresh"
        )
    assumed = {**ASSUMED[found.rule], "schedule": "cosine"}
    if not found.clips:
        stated.setdefault("clip", None)
    if not found.decays:
        stated.setdefault("decay", 0.0)
    values = {**assumed, **stated, "name": found.rule, "momentum_dtype": found.momentum_dtype}
    return optim_config(values, where), [name for name in assumed if name not in stated]


def _run_config(model: VQConfig, settings: dict[str, Any], flags: ImportFlags, optim: OptimConfig) -> RunConfig:
    """Return the run config. Lengths come from the flags, else from the file (rounded up to a multiple of the block length), else
    they are four blocks."""
    from linnet.config.schema import RunConfig

    cfg = RunConfig(preset="transformer-vq")
    block, sequence = model.block_len, flags.sequence_len
    if sequence is not None and (sequence < 1 or sequence % block):
        needs = f"a multiple of the block length ({block})"
        raise invalid("--sequence-len", sequence, needs, f"use {max(block, round(sequence / block) * block)}")
    update = flags.update_len or _round_up(settings.get("update_len") or 4 * block, block)
    if flags.update_len is None and sequence is not None:
        update = math.gcd(update, sequence)
    if update < 1 or update % block:
        needs = f"a multiple of the block length ({block})"
        raise invalid("--update-len", update, needs, f"use {max(block, round(update / block) * block)}")
    sequence = sequence or _round_up(settings.get("sequence_len") or update, update)
    if sequence % update:
        needs = f"a multiple of the update length ({update})"
        raise invalid("--sequence-len", sequence, needs, f"use {_round_up(sequence, update)}, or another --update-len")
    batch = settings.get("global_batch_size", cfg.data.batch_size)
    if not isinstance(batch, int) or batch < 1:
        raise invalid("the setting global_batch_size", batch, "a number of sequences", "correct it in the settings")
    data = dataclasses.replace(cfg.data, update_len=update, sequence_len=sequence, batch_size=batch)
    return dataclasses.replace(cfg, model=model, data=data, optim=optim)


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit
