"""`linnet import` and `linnet export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from linnet.cli.parse import parse
from linnet.config import RunConfig
from linnet.errors import UserError, refuse
from linnet.families.vq.config import VQConfig


@dataclasses.dataclass(frozen=True)
class ImportFlags:
    kind: Annotated[Literal["transformer-vq", "safetensors"], tyro.conf.Positional]
    """What the file is: an official Transformer-VQ checkpoint (.npz of '/'-joined names, or Flax msgpack), or Linnet's own export."""
    file: Annotated[Path, tyro.conf.Positional]
    out: Path
    """The folder of the new run."""
    block_len: int | None = None
    """As the model was trained, where the file does not tell (the paper's: 512)."""
    mem_len: int | None = None
    pe_lam: float | None = None
    e_scale: float | None = None
    """The paper's: 1 for enwik8, 0.005 for PG-19 and ImageNet64."""
    agg_cache: bool | None = None
    source: str | None = None
    """Text to evaluate the run on; this Python's standard library if not given."""
    tokenizer: str | None = None
    """What the model's ids mean, kept with the run: a sentencepiece .model, a tokenizer.json, or a folder with one."""


def import_command(argv: list[str]) -> int:
    flags = parse(
        ImportFlags,
        argv,
        "import",
        "Makes a run of weights from elsewhere: it can be evaluated, sampled and trained further.",
    )
    from linnet.cli.startup import prepare_jax
    from linnet.data.tokenizer import open_tokenizer
    from linnet.train.interchange.weights_file import import_safetensors
    from linnet.train.runs import write_run

    tokenizer = None if flags.tokenizer is None else open_tokenizer(flags.tokenizer)
    if (flags.out / "config.json").exists():
        raise UserError(f"{flags.out} holds a run already, and nothing is overwritten. Fix: choose another --out.")
    prepare_jax()
    if flags.kind == "safetensors":
        from linnet import config as configs

        params, buffers, values = import_safetensors(flags.file)
        values.pop("version")
        cfg = configs.from_dict(RunConfig, values, "")
    else:
        cfg, params, buffers = _transformer_vq(flags)
    if flags.source is not None:
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, source=flags.source))
    if tokenizer is not None:
        if tokenizer.n_vocab > cfg.model.n_vocab:
            needs = f"at most the model's {cfg.model.n_vocab} ids (it has {tokenizer.n_vocab})"
            raise refuse("--tokenizer", flags.tokenizer, needs, "name the one that the model was trained with")
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, end_id=tokenizer.end_id))
    write_run(flags.out, cfg, params, buffers)
    if tokenizer is not None:
        tokenizer.save(flags.out)
    print(f"The run is in {flags.out}. Next: linnet eval {flags.out}; linnet sample {flags.out}")
    return 0


def _transformer_vq(flags: ImportFlags) -> tuple[RunConfig, Any, Any]:
    from linnet.train.interchange.transformer_vq import import_config, read_transformer_vq, to_model

    tree, settings = read_transformer_vq(flags.file)
    told = ("block_len", "mem_len", "pe_lam", "e_scale", "agg_cache")
    overrides = {name: getattr(flags, name) for name in told if getattr(flags, name) is not None}
    model: VQConfig = import_config(tree, settings, overrides=overrides)
    params, buffers = to_model(tree, model)
    return _run_config(model, settings), params, buffers


def _run_config(model: VQConfig, settings: dict[str, Any]) -> RunConfig:
    """The lengths the file tells where they fit, else sequences of a few blocks."""
    cfg = RunConfig(preset="transformer-vq")
    update = settings.get("update_len") or 4 * model.block_len
    update = -(-update // model.block_len) * model.block_len
    sequence = -(-(settings.get("sequence_len") or update) // update) * update
    data = dataclasses.replace(cfg.data, update_len=update, sequence_len=sequence)
    return dataclasses.replace(cfg, model=model, data=data)


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    out: Path | None = None
    """The file; RUN.safetensors or RUN.npz beside the run if not given."""
    format: Literal["safetensors", "transformer-vq"] = "safetensors"
    """`safetensors`: weights, codebooks and config, read back bit for bit by `linnet import safetensors`; `transformer-vq`: the
    official tree as .npz."""
    checkpoint: str = "best"
    """`best` (by validation loss; the latest if there is none), `latest`, or a step."""


def export_command(argv: list[str]) -> int:
    flags = parse(
        ExportFlags, argv, "export", "Writes a run's weights (the moving average where it keeps one) to one file."
    )
    from linnet import config as configs
    from linnet.cli.startup import prepare_jax
    from linnet.train.interchange.weights_file import export_safetensors
    from linnet.train.runs import open_run

    prepare_jax()
    run = open_run(flags.run, flags.checkpoint)
    suffix = ".safetensors" if flags.format == "safetensors" else ".npz"
    out = flags.out or flags.run.with_name(flags.run.name + suffix)
    if flags.format == "safetensors":
        mark = export_safetensors(run.params, run.buffers, configs.to_json(run.cfg), out)
        print(f"Wrote {out} (step {run.step}, fingerprint {mark[:12]}).")
    else:
        import numpy as np

        from linnet.families.vq.convert import to_reference
        from linnet.train.interchange.npz import write_npz

        settings = {**dataclasses.asdict(run.cfg.model), **_lengths(run.cfg)}
        meta = {"family": "vq", "kind": "params", "config": settings}
        write_npz(out, {**to_reference(run.params, run.buffers, run.cfg.model), "meta": np.array(json.dumps(meta))})
        print(f"Wrote {out} (step {run.step}).")
    return 0


def _lengths(cfg: RunConfig) -> dict[str, int]:
    return {"sequence_len": cfg.data.sequence_len, "update_len": cfg.data.update_len}
