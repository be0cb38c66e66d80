"""`linnet import dalle2-prior`: import a checkpoint of DALLE2-pytorch's prior as a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.core.errors import invalid

if TYPE_CHECKING:
    from linnet.cli.interchange_flags import ImportFlags
    from linnet.config.schema import RunConfig
    from linnet.convert.dalle2.parts import Train
    from linnet.convert.dalle2.prior import ImportedPrior
    from linnet.convert.dalle2.trainer import TrainerState
    from linnet.models.prior.config import PriorConfig
    from linnet.models.prior.releases import Release

OF_OTHERS = (
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
    for name in OF_OTHERS:
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
    from linnet.cli.startup import init_jax
    from linnet.config.schema import PairsConfig, RunConfig
    from linnet.convert.dalle2.config import PRESET, optim_config, train_config
    from linnet.convert.dalle2.prior import read_prior_checkpoint
    from linnet.convert.dalle2.trainer import trained_with, with_adam
    from linnet.runs.weights import check_is_new

    check_is_new(out)
    init_jax()
    found = read_prior_checkpoint(flags.file, settings, flags.which, flags.release)
    trainer, remark = find_trainer(flags.file, found, flags.optimizer)
    if trainer is not None and flags.settings is None:
        train = dataclasses.replace(train, **trained_with(trainer))
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
        f"{'Averaged' if found.which == 'ema' else 'Trained'} weights: width {model.dim}, {model.depth} layers, {model.timesteps} "
        f"steps ({model.schedule})" + (f"; {facts}." if facts else ".")
    )
    print(release_remark(found.release, model))
    if flags.which != found.which:
        print(f"The file has no {flags.which} weights.")
    if flags.settings is None:
        print(
            f"Assumed, since weights do not show it: it predicts {model.objective}, embeddings are scaled by "
            f"{model.scale:g}, texts have {'' if model.text_encodings else 'no '}token encodings, and conditions were dropped in "
            "training. Else: --settings FILE.json, the JSON it was trained with"
            + ("." if flags.text_encodings else ", or --text-encodings.")
        )
    if flags.source is None:
        print(
            f"Its pairs are {cfg.data.source} until others are named: --source, or `linnet train {out} --data.source PAIRS`."
        )
    print(remark)
    print(f"The run is in {out}. Next: linnet sample {out} --embedding FILE.npy; linnet eval {out}; linnet serve {out}")
    return 0


def release_remark(release: Release, model: PriorConfig) -> str:
    """Return a message about what the network computes, and how that was determined."""
    from linnet.models.prior.releases import NEWEST, OLDEST, WRONG_VELOCITY, parse

    text = {
        "mask": "missing text is hidden from attention",
        "learned_padding": "missing text is learned padding, and guidance has no effect",
        "null_vectors": "missing text is learned null vectors"
        + ("" if model.drop_text_embedding else ", and guidance does not drop the text's embedding"),
    }[model.text_conditioning]
    norm = {"plain": "plain", "maximum": "by maximum"}
    words = [
        f"Network of DALLE2-pytorch {release.version}, family {release.family} ({release.source}): {model.scores} scores"
        + ("" if model.bias_scale == 1 else f", position bias times {model.bias_scale:g}")
        + f", norms {norm[model.norms]}, the last one {norm[model.last_norm]}; {text}."
    ]
    if not parse(OLDEST) <= parse(release.version) <= parse(NEWEST):
        words.append(f"Releases from {OLDEST} to {NEWEST} are known; this one is taken to be like the nearest of them.")
    if parse(release.version) == parse(WRONG_VELOCITY):
        words.append("If it was trained with predict_v, it cannot be used: that release has a wrong sign there.")
    return " ".join(words)


def write_imported(out: Path, cfg: RunConfig, found: ImportedPrior, trainer: TrainerState | None) -> None:
    """Write a weights-only run, with the trainer state if any. Data and settings can still be changed until it is trained."""
    from linnet.convert.dalle2.trainer import store_trainer
    from linnet.runs.weights import held_leaves, write_stored_run

    def finish(folder: Path) -> None:
        if trainer is not None:
            store_trainer(folder, found, trainer)

    write_stored_run(out, cfg, held_leaves(found.params), finish, lambda words: None)


def start_from_checkpoint(path: Path, out: Path, cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Start the run of a reference config from the checkpoint that its tracker loads. The shapes of the weights must agree with the
    config; the behaviour of the release comes from the checkpoint."""
    from linnet.convert.dalle2.export import BEHAVIOUR
    from linnet.convert.dalle2.prior import read_prior_checkpoint
    from linnet.convert.dalle2.trainer import with_adam

    settings = {name: value for name, value in dataclasses.asdict(cfg.prior).items() if name not in BEHAVIOUR}
    found = read_prior_checkpoint(path, settings)
    trainer, remark = find_trainer(path, found, "auto")
    optim = cfg.optim if trainer is None or cfg.optim.name != "adamw" else with_adam(cfg.optim, trainer)
    cfg = dataclasses.replace(cfg, model=found.cfg, optim=optim)
    write_imported(out, cfg, found, trainer)
    return cfg, [f"tracker.load: {path}. {release_remark(found.release, found.cfg)} {remark}"]


def find_trainer(file: Path, found: ImportedPrior, wanted: str) -> tuple[TrainerState | None, str]:
    """Return the trainer state from which training resumes, if any, and a message about it."""
    from linnet.convert.dalle2.trainer import NotContinuable, trainer_state

    if wanted == "fresh":
        return None, "Training starts at step 0 with a fresh optimizer."
    try:
        trainer = trainer_state(found.content, found.cfg, found.facts.get("version"), file)
    except NotContinuable as error:
        if wanted == "keep":
            raise
        why = str(error).split(". Fix:")[0]
        return None, f"Training starts at step 0 from these weights: {why}."
    return (
        trainer,
        f"Training continues at step {trainer.step} with the trained weights, their average and Adam's state.",
    )


def _settings(path: Path | None) -> tuple[dict[str, Any], Train]:
    """Read the reference's JSON (complete, or its part `prior`). Return the model settings as Linnet's fields, and the training
    settings."""
    from linnet.config.codec import from_dict
    from linnet.convert.dalle2.config import import_settings
    from linnet.convert.dalle2.parts import Train, read_json, read_prior

    if path is None:
        return {}, Train()
    values = read_json(path)
    whole = isinstance(values, dict) and "prior" in values
    said = values["prior"] if whole else values
    train = from_dict(Train, values.get("train") or {}, "train.") if whole else Train()
    return import_settings(read_prior(said), said), train
