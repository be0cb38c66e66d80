"""Writes an imported DALLE2-pytorch prior as a run, with the trainer's state if the checkpoint has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from linnet.config.schema import RunConfig
from linnet.convert.dalle2.export import BEHAVIOUR
from linnet.convert.dalle2.prior import ImportedPrior, read_prior_checkpoint
from linnet.convert.dalle2.trainer import (
    TrainerState,
    UnusableTrainerState,
    read_trainer_state,
    store_trainer,
    with_adam,
)
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.releases import NEWEST, OLDEST, WRONG_VELOCITY, Release, parse
from linnet.runs.weights import model_leaves, write_stored_run


def describe_release(release: Release, model: PriorConfig) -> str:
    """Return a message about what the network computes, and how that was determined."""
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

    def finish(folder: Path) -> None:
        if trainer is not None:
            store_trainer(folder, found, trainer)

    write_stored_run(out, cfg, model_leaves(found.params), finish, lambda words: None)


def start_from_checkpoint(path: Path, out: Path, cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Start the run of a reference config from the checkpoint that its tracker loads. The shapes of the weights must agree with the
    config; the behaviour of the release comes from the checkpoint."""
    settings = {name: value for name, value in dataclasses.asdict(cfg.prior).items() if name not in BEHAVIOUR}
    found = read_prior_checkpoint(path, settings)
    trainer, remark = find_trainer(path, found, "auto")
    optim = cfg.optim if trainer is None or cfg.optim.name != "adamw" else with_adam(cfg.optim, trainer)
    cfg = dataclasses.replace(cfg, model=found.cfg, optim=optim)
    write_imported(out, cfg, found, trainer)
    return cfg, [f"tracker.load: {path}. {describe_release(found.release, found.cfg)} {remark}"]


def find_trainer(file: Path, found: ImportedPrior, wanted: str) -> tuple[TrainerState | None, str]:
    """Return the trainer state from which training resumes, if any, and a message about it."""
    if wanted == "fresh":
        return None, "Training starts at step 0 with a fresh optimizer."
    try:
        trainer = read_trainer_state(found.content, found.cfg, found.facts.get("version"), file)
    except UnusableTrainerState as error:
        if wanted == "keep":
            raise
        why = str(error).split(". Fix:")[0]
        return None, f"Training starts at step 0 from these weights: {why}."
    return (
        trainer,
        f"Training continues at step {trainer.step} with the trained weights, their average and Adam's state.",
    )
