"""Schema of the settings file of DALLE2-pytorch's prior (0.x and 1.x), with names and types checked.

Names and defaults are the reference's, so that omitted fields have the same meaning as there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from linnet.config.codec import from_dict
from linnet.core.errors import UserError, invalid
from linnet.models.prior.config import Loss, Schedule

T = TypeVar("T")
DECODERS = ("decoder", "unets", "unet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    make: str = "openai"
    model: str = "ViT-L/14"
    base_model_kwargs: dict | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Net:
    dim: int
    depth: int
    num_timesteps: int | None = None
    """None: the time is continuous."""
    max_text_len: int | None = None
    num_time_embeds: int = 1
    num_image_embeds: int = 1
    num_text_embeds: int = 1
    dim_head: int = 64
    heads: int = 8
    ff_mult: int = 4
    norm_in: bool = False
    norm_out: bool = True
    attn_dropout: float = 0.0
    ff_dropout: float = 0.0
    final_proj: bool = True
    normformer: bool = False
    rotary_emb: bool = True
    self_cond: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    net: Net
    clip: Clip | None = None
    image_embed_dim: int | None = None
    image_size: int | None = None
    image_channels: int = 3
    timesteps: int = 1000
    sample_timesteps: int | None = None
    cond_drop_prob: float = 0.0
    text_cond_drop_prob: float | None = None
    image_cond_drop_prob: float | None = None
    loss_type: Loss = "l2"
    predict_x_start: bool = True
    predict_v: bool = False
    beta_schedule: Schedule = "cosine"
    condition_on_text_encodings: bool = True
    init_image_embed_l2norm: bool = False
    training_clamp_l2norm: bool = False
    sampling_clamp_l2norm: bool = False
    sampling_final_clamp_l2norm: bool = False
    image_embed_scale: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    train: float = 0.75
    val: float = 0.15
    test: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    image_url: str
    text_url: str | None = None
    meta_url: str | None = None
    splits: Splits = dataclasses.field(default_factory=Splits)
    batch_size: int = 64
    num_data_points: int | None = None
    """None: all existing pairs. (The reference's default is 250 million, which must then exist.)"""
    eval_every_seconds: float = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    epochs: int = 1
    lr: float = 1.1e-4
    wd: float = 6.02e-2
    max_grad_norm: float | None = 0.5
    use_ema: bool = True
    ema_beta: float = 0.99
    ema_update_after_step: int = 100
    ema_update_every: int = 10
    ema_inv_gamma: float = 1.0
    ema_power: float = 2 / 3
    ema_min_value: float = 0.0
    warmup_steps: int | None = None
    cosine_decay_max_steps: int | None = None
    amp: bool = False
    save_every_seconds: float = 3600.0
    save_every: int | None = None
    """In updates; only in older versions."""
    eval_timesteps: tuple[int, ...] | None = None
    """None: 64, or all if there are fewer."""
    best_validation_loss: float = 1e9
    current_epoch: int = 0
    num_samples_seen: int = 0
    random_seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    log_type: Literal["console", "wandb"] = "console"
    resume: bool = False
    auto_resume: bool = False
    verbose: bool = False
    wandb_entity: str | None = None
    wandb_project: str | None = None
    wandb_run_id: str | None = None
    wandb_run_name: str | None = None
    wandb_resume: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    load_from: Literal["local", "url", "wandb"] | None = None
    only_auto_resume: bool = False
    file_path: str | None = None
    url: str | None = None
    wandb_file_path: str | None = None
    wandb_run_path: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    save_to: Literal["local", "wandb", "huggingface"] = "local"
    save_type: Literal["checkpoint", "model"] = "checkpoint"
    save_all: bool = False
    save_latest: bool = True
    save_best: bool = True
    save_latest_to: object = None
    """A path, or false for nowhere; the same for the next two."""
    save_best_to: object = None
    save_meta_to: object = None
    huggingface_repo: str | None = None
    token_path: str | None = None
    wandb_run_path: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracker:
    data_path: str | None = None
    overwrite_data_path: bool = False
    log: Log | None = None
    load: Load | None = None
    save: tuple[Save, ...] = ()
    # Fields of older versions, which had no sections for these:
    tracker_type: Literal["console", "wandb"] | None = None
    init_config: dict | None = None
    wandb_entity: str | None = None
    wandb_project: str | None = None
    verbose: bool = False

    @property
    def kind(self) -> str:
        return self.log.log_type if self.log else self.tracker_type or "console"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LegacyLoad:
    source: str | None = None
    resume: bool = False
    run_path: str | None = None
    file_path: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DallE2Config:
    """A complete settings file."""

    prior: Prior
    data: Data
    train: Train = dataclasses.field(default_factory=Train)
    tracker: Tracker = dataclasses.field(default_factory=Tracker)
    load: LegacyLoad = dataclasses.field(default_factory=LegacyLoad)


def read_json(path: Path) -> Any:
    """Read a JSON file; integral floats such as 25e7 become ints, as in the reference."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() else value

    def never(text: str) -> Any:
        raise UserError(f"{path} has {text}, which is not a number. Fix: correct it.")

    try:
        return json.loads(path.read_bytes(), parse_float=number, parse_constant=never)
    except OSError as error:
        raise invalid("--config", str(path), f"a file that can be read ({error.strerror})", "check the path") from None
    except UserError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}). Fix: correct it.") from None


def is_dalle2_config(values: Any) -> bool:
    """Return whether this is a file of the reference, as opposed to a run's own config.json."""
    return isinstance(values, dict) and "version" not in values and any(name in values for name in ("prior", *DECODERS))


def parse_config(values: Mapping[str, Any], path: Path) -> DallE2Config:
    """Parse a settings file; an unknown field or wrong type raises, with the nearest known name."""
    odd = next((name for name in DECODERS if name in values), None)
    if odd is not None:
        raise invalid(
            f"{path}", f"a config with {odd!r}", "that of a prior; Linnet has no decoder", "name the config of a prior"
        )
    _require(values, "", "prior", "data")
    _require(values["data"], "data.", "image_url")
    tracker = values.get("tracker")
    if isinstance(tracker, dict) and isinstance(tracker.get("save"), dict):  # a single saver may have no list
        values = {**values, "tracker": {**tracker, "save": [tracker["save"]]}}
    parse_prior(values["prior"])
    return from_dict(DallE2Config, {name: value for name, value in values.items() if value is not None}, "")


def parse_prior(values: Any) -> Prior:
    """Parse the section `prior`, which describes the model of a checkpoint."""
    _require(values, "prior.", "net")
    _require(values["net"], "prior.net.", "dim", "depth")
    return from_dict(Prior, values, "prior.")


def _require(values: Any, where: str, *names: str) -> None:
    if not isinstance(values, dict):
        raise invalid(where.rstrip(".") or "the file", values, "an object of settings", "see the reference's examples")
    for name in names:
        if values.get(name) is None:
            raise UserError(f"{where}{name} is missing. Fix: add it, as in the reference's examples.")
