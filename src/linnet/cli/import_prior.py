"""`linnet import dalle2-prior`: import a checkpoint of DALLE2-pytorch's prior as a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.cli.convert_flags import ImportFlags
    from linnet.convert.dalle2.schema import Train

NOT_OF_PRIORS = (
    "tokenizer",
    "begin_id",
    "block_len",
    "mem_len",
    "pe_lam",
    "e_scale",
    "agg_cache",
)
STEPS = 10_000
"""Default number of further updates for an imported run."""


def import_prior(flags: ImportFlags) -> int:
    if flags.file is None:
        raise invalid("FILE", None, "given", "name the checkpoint to import")
    for name in NOT_OF_PRIORS:
        if getattr(flags, name) is not None:
            needs = "left out: a prior has no such setting"
            raise invalid(f"--{name.replace('_', '-')}", getattr(flags, name), needs, "leave it out")
    if flags.weights != "float32":
        raise invalid("--weights", flags.weights, "float32 with dalle2-prior, which is small", "leave it out")
    out = flags.out or Path("runs") / flags.file.stem
    settings, train = _settings(flags.settings)
    if flags.text_encodings:
        if not settings.get("text_encodings", True):
            needs = f"left out: prior.condition_on_text_encodings in {flags.settings} is false"
            raise invalid("--text-encodings", True, needs, "leave it out, or correct the JSON")
        settings = {**settings, "text_encodings": True}
    from linnet.config.schema import PairsConfig, RunConfig
    from linnet.convert.dalle2.config import PRESET, optim_config, train_config
    from linnet.convert.dalle2.importer import describe_release, find_trainer, write_imported
    from linnet.convert.dalle2.prior import read_prior_checkpoint
    from linnet.convert.dalle2.trainer import train_settings, with_adam
    from linnet.parallel.cluster import init_jax
    from linnet.runs.weights import check_is_new

    check_is_new(out)
    init_jax()
    found = read_prior_checkpoint(flags.file, settings, flags.which, flags.release)
    trainer, remark = find_trainer(flags.file, found, flags.optimizer)
    if trainer is not None and flags.settings is None:
        train = dataclasses.replace(train, **train_settings(trainer))
    steps = max(
        (trainer.step if trainer else 0) + STEPS, (train.warmup_steps or 0) + 1, train.cosine_decay_max_steps or 1
    )
    cfg = RunConfig(
        preset=PRESET,
        family="prior",
        seed=train.random_seed,
        model=found.cfg,
        data=PairsConfig() if flags.source is None else PairsConfig(source=flags.source),
        optim=optim_config(train, steps) if trainer is None else with_adam(optim_config(train, steps), trainer),
        train=train_config(train, found.cfg.timesteps),
    )
    write_imported(out, cfg, found, trainer)
    model = found.cfg
    facts = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    print(
        f"{'EMA' if found.which == 'ema' else 'Online'} weights: width {model.dim}, {model.depth} layers, {model.timesteps} "
        f"steps ({model.schedule})" + (f"; {facts}." if facts else ".")
    )
    print(describe_release(found.release, model))
    if flags.which != found.which:
        print(f"The file has no {flags.which} weights.")
    if flags.settings is None:
        print(
            f"Assumed, since weights do not show it: it predicts {model.objective}, embeddings are scaled by "
            f"{model.scale:g}, texts have {'' if model.text_encodings else 'no '}token encodings, and conditions were dropped in "
            "training. If this is wrong, give --settings FILE.json, the JSON it was trained with"
            + ("." if flags.text_encodings else ", or --text-encodings.")
        )
    if flags.source is None:
        print(
            f"Its data is {cfg.data.source}. To use other pairs, give --source, or `linnet train {out} --data.source PAIRS`."
        )
    print(remark)
    print(f"The run is in {out}. Next: linnet sample {out} --embedding FILE.npy; linnet eval {out}; linnet serve {out}")
    return 0


def _settings(path: Path | None) -> tuple[dict[str, Any], Train]:
    """Read the reference's JSON (complete, or its part `prior`). Return the model settings as Linnet's fields, and the training
    settings."""
    from linnet.config.codec import from_dict
    from linnet.convert.dalle2.config import import_settings
    from linnet.convert.dalle2.schema import Train, parse_prior, read_json

    if path is None:
        return {}, Train()
    values = read_json(path)
    is_complete = isinstance(values, dict) and "prior" in values
    prior = values["prior"] if is_complete else values
    train = from_dict(Train, values.get("train") or {}, "train.") if is_complete else Train()
    return import_settings(parse_prior(prior), prior), train
