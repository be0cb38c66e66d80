"""Convert DALLE2-pytorch settings to a run config: every field is applied, rejected with a reason, or reported in a remark."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linnet.config.schema import OptimConfig, PairsConfig, RunConfig, TrainConfig
from linnet.convert.dalle2.schema import DallE2Config, Data, Prior, Splits, Train
from linnet.convert.dalle2.tracker import export_targets, find_loaded_file, has_wandb, tracker_remarks
from linnet.core.errors import invalid
from linnet.models.prior.config import Objective, PriorConfig
from linnet.models.prior.reference import NETWORK, network_config

PRESET = "dalle2-prior"
ROUND_OFF = 1e-5
"""Tolerance of the sum of three shares written with few digits."""
MAX_TEXT_LEN = 256
"""The reference's default number of token positions."""
BETAS, EPSILON = (0.9, 0.99), 1e-6
"""Adam constants of the reference's trainer; its settings files do not contain them."""
FRESH_LOSS = 1e9
# Settings that the weights determine as well: if the file states them, they must agree.
SET_BY_WEIGHTS = {"timesteps": "timesteps", "beta_schedule": "schedule"}


def model_config(prior: Prior) -> PriorConfig:
    net = prior.net
    if prior.image_embed_dim not in (None, net.dim):
        needs = f"prior.net.dim ({net.dim}): the network is as wide as the embedding"
        raise invalid("prior.image_embed_dim", prior.image_embed_dim, needs, f"use {net.dim}")
    if net.num_timesteps not in (None, prior.timesteps):
        needs = f"prior.timesteps ({prior.timesteps}), or null for continuous time"
        raise invalid("prior.net.num_timesteps", net.num_timesteps, needs, f"use {prior.timesteps}")
    if prior.predict_v and prior.training_clamp_l2norm:
        needs = "false with prior.predict_v: a velocity does not have the norm of an embedding"
        raise invalid("prior.training_clamp_l2norm", True, needs, "leave it out")
    settings = {**dataclasses.asdict(net), "max_text_len": net.max_text_len or MAX_TEXT_LEN}
    return network_config(settings, **_diffusion(prior))


def _diffusion(prior: Prior) -> dict[str, Any]:
    drop = prior.cond_drop_prob
    objective: Objective = "v" if prior.predict_v else "x_start" if prior.predict_x_start else "noise"
    return {
        "timesteps": prior.timesteps,
        "schedule": prior.beta_schedule,
        "text_encodings": prior.condition_on_text_encodings,
        "p_drop_text": drop if prior.text_cond_drop_prob is None else prior.text_cond_drop_prob,
        "p_drop_image": drop if prior.image_cond_drop_prob is None else prior.image_cond_drop_prob,
        "objective": objective,
        "loss": prior.loss_type,
        "image_embed_scale": prior.image_embed_scale,
        "normalize_start": prior.init_image_embed_l2norm,
        "normalize_training": prior.training_clamp_l2norm,
        "normalize_steps": prior.sampling_clamp_l2norm,
        "normalize_final": prior.sampling_final_clamp_l2norm,
    }


def import_settings(prior: Prior, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint's weights do not determine, and those that they do determine if the file states them."""
    model = dataclasses.asdict(model_config(prior))
    names = {ours for theirs, ours in SET_BY_WEIGHTS.items() if theirs in settings}
    names |= {ours for theirs, ours in NETWORK.items() if settings["net"].get(theirs) is not None}
    names |= {"p_drop_attention", "p_drop_ff", "self_cond"} | (set(_diffusion(prior)) - set(SET_BY_WEIGHTS.values()))
    return {name: model[name] for name in names}


def optim_config(train: Train, steps: int) -> OptimConfig:
    """Build the optimizer config; `steps` is the total number of updates.

    The reference's cosine has a length of its own, and rises again after it.
    """
    wave = train.cosine_decay_max_steps
    if wave is not None and wave > steps:
        needs = f"at most the {steps:,} updates of the run: here the cosine ends with its run"
        raise invalid("train.cosine_decay_max_steps", wave, needs, f"use {steps}, or more epochs")
    return OptimConfig(
        name="adamw",
        lr=train.lr,
        schedule="dampened_constant" if wave is None else "dampened_cosine",
        warmup_steps=train.warmup_steps or 0,
        steps=steps if wave is None else wave,
        extra_steps=0 if wave is None else steps - wave,
        clip=train.max_grad_norm,
        decay=train.wd,
        decay_by_lr=True,
        b1=BETAS[0],
        b2=BETAS[1],
        eps=EPSILON,
    )


def train_config(train: Train, timesteps: int, data: Data | None = None, trackers: tuple[Any, ...] = ()) -> TrainConfig:
    """Build the training config; `timesteps` are those of the diffusion."""
    by_steps = train.save_every is not None
    return TrainConfig(
        ema_decay=train.ema_beta if train.use_ema else None,
        ema_power=train.ema_power if train.use_ema else None,
        ema_inv_gamma=train.ema_inv_gamma,
        ema_min=train.ema_min_value,
        ema_after=train.ema_update_after_step,
        ema_every=train.ema_update_every,
        eval_every=0,
        eval_minutes=60.0 if data is None else data.eval_every_seconds / 60,
        eval_timesteps=(min(64, timesteps),) if train.eval_timesteps is None else train.eval_timesteps,
        checkpoint_every=train.save_every or 0,
        checkpoint_minutes=0.0 if by_steps else train.save_every_seconds / 60,
        trackers=trackers,
    )


def run_config(parts: DallE2Config) -> RunConfig:
    """Build the run config before any path is opened, because command-line flags may still change it."""
    data, train = parts.data, parts.train
    _check(parts)
    model = model_config(parts.prior)
    steps = count_updates(parts, data.num_data_points or data.batch_size, data.batch_size)
    trackers = ("wandb",) if parts.tracker.kind == "wandb" and has_wandb() else ()
    return RunConfig(
        preset=PRESET,
        family="prior",
        seed=train.random_seed,
        model=dataclasses.replace(model, dtype="bfloat16") if train.amp else model,
        data=PairsConfig(
            images=data.image_url,
            texts=data.text_url,
            metadata=data.meta_url,
            validation_fraction=data.splits.val,
            test_fraction=data.splits.test,
            batch_size=data.batch_size,
        ),
        # A length that passes every check: the number of pairs is only known when they are opened.
        optim=optim_config(train, max(steps, (train.warmup_steps or 0) + 1, train.cosine_decay_max_steps or 1)),
        train=dataclasses.replace(train_config(train, model.timesteps, data, trackers), exports=export_targets(parts)),
    )


def count_updates(parts: DallE2Config, n_pairs: int, batch_size: int) -> int:
    """Return the number of updates for `epochs` passes over the training pairs. Batches cross epochs, so none is short."""
    return max(1, math.ceil(parts.train.epochs * n_pairs * parts.data.splits.train / batch_size - 1e-9))


def _check(parts: DallE2Config) -> None:
    train = parts.train
    if train.epochs < 1:
        raise invalid("train.epochs", train.epochs, "at least 1", "use 1")
    _check_splits(parts.data.splits)
    if (parts.data.num_data_points or 1) < 1:
        raise invalid("data.num_data_points", parts.data.num_data_points, "at least 1", "leave it out for all")
    for name in ("current_epoch", "num_samples_seen"):
        if getattr(train, name) and find_loaded_file(parts) is None:
            needs = "0: Linnet resumes its own runs by itself, exactly"
            fix = "leave it out; to start from a checkpoint of the reference, use `linnet import dalle2-prior FILE`"
            raise invalid(f"train.{name}", getattr(train, name), needs, fix)
    find_loaded_file(parts)
    export_targets(parts)


def _check_splits(splits: Splits) -> None:
    shares = (splits.train, splits.val, splits.test)
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > ROUND_OFF:
        raise invalid("data.splits", shares, f"fractions that sum to 1 (these sum to {sum(shares):g})", "correct them")
    if not splits.train:
        raise invalid("data.splits.train", 0, "above 0", "leave a fraction for training")


def default_run_folder(parts: DallE2Config, path: Path) -> Path:
    """Return the default run folder: the data path of the reference's tracker, if set."""
    place = parts.tracker.data_path
    return Path("runs") / path.stem if place is None else Path(place)


def remarks(parts: DallE2Config) -> Iterator[str]:
    """Yield remarks on settings that are applied differently or ignored, without an effect on training."""
    prior, train = parts.prior, parts.train
    if prior.image_size is not None or prior.image_channels != 3:
        yield "prior.image_size and image_channels are not used: embeddings are read, not images."
    if prior.clip is not None:
        name = f"{prior.clip.make} {prior.clip.model}"
        yield f"prior.clip ({name}) is not loaded: the embeddings in the files are used, which should come from that model."
    if prior.sample_timesteps is not None:
        n = prior.sample_timesteps
        yield f"prior.sample_timesteps is chosen when sampling: `linnet sample RUN --solver ddim --steps {n}`."
    if not prior.predict_x_start:
        yield "The reference clips predicted embeddings to [-1, 1] while sampling; Linnet does so only with --model.clip-start."
    if prior.predict_v and (prior.sampling_clamp_l2norm or prior.sampling_final_clamp_l2norm):
        yield "prior.sampling_clamp_l2norm and sampling_final_clamp_l2norm have no effect with prior.predict_v."
    if train.amp:
        yield "train.amp is bfloat16 here (model.dtype), not float16: no loss scaling is needed."
    if train.best_validation_loss != FRESH_LOSS:
        yield "train.best_validation_loss is not used: the best checkpoint is that of this run."
    if find_loaded_file(parts) is not None and (train.current_epoch or train.num_samples_seen):
        yield "train.current_epoch and num_samples_seen are not used: the checkpoint of tracker.load contains them."
    yield from tracker_remarks(parts)
