"""Conversion of the reference's settings to `PriorConfig`, from a config file or from the weights of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from linnet.core.errors import UserError, invalid
from linnet.models.prior.config import PriorConfig, Schedule
from linnet.models.prior.convert import BLOCK, ROTARY, current_names
from linnet.models.prior.releases import Release
from linnet.models.prior.schedule import betas

SCHEDULES: tuple[Schedule, ...] = ("cosine", "linear", "quadratic", "sigmoid", "jsd")

NETWORK = {
    "dim": "dim",
    "depth": "depth",
    "heads": "n_head",
    "dim_head": "d_head",
    "ff_mult": "ff_mult",
    "max_text_len": "max_text_len",
    "num_time_embeds": "n_time_token",
    "num_image_embeds": "n_image_token",
    "num_text_embeds": "n_text_token",
    "norm_in": "norm_in",
    "norm_out": "norm_out",
    "final_proj": "final_proj",
    "normformer": "normformer",
    "rotary_emb": "rotary",
    "self_cond": "self_cond",
    "attn_dropout": "p_drop_attention",
    "ff_dropout": "p_drop_ff",
}
CLIP_TOKENS = 77
# Defaults of the reference's network.
DEFAULTS = {"n_head": 8, "d_head": 64, "ff_mult": 4, "max_text_len": 256}


def network_config(settings: Mapping[str, Any], **more: Any) -> PriorConfig:
    """Convert the reference's network settings. `more`: fields of PriorConfig."""
    known = {ours: settings[theirs] for theirs, ours in NETWORK.items() if theirs in settings}
    if "num_timesteps" in settings:
        steps = settings["num_timesteps"]
        known |= {"continuous_time": steps is None, **({} if steps is None else {"timesteps": steps})}
    else:
        known["continuous_time"] = True
    return PriorConfig(**{**DEFAULTS, **known, **more})


def infer_config(
    state: Mapping[str, Any], noise: Float[np.ndarray, " T"] | None, settings: Mapping[str, Any], release: Release
) -> PriorConfig:
    """Infer the config of a network's state dict. Settings that the weights do not determine come from `settings` (fields of
    PriorConfig), which must not contradict them. The meaning of the weights depends on the `release` that trained them."""
    state = {name: np.asarray(value) for name, value in state.items()}
    names = current_names(state)
    _check_ranks(names)
    depths = {
        int(layer[1]) for name in names if (layer := re.match(BLOCK.replace(".", r"\.") + r"layers\.(\d{1,5})\.", name))
    }
    first = BLOCK + "layers.0."
    if not depths or first + "1.5.weight" not in names:
        raise UserError("the weights have no layers. Fix: name a checkpoint of a DALLE2-pytorch prior.")
    dim = names["learned_query"].shape[-1]
    table = names.get("to_time_embeds.0.weight")
    last = names.get("to_time_embeds.0.1.net.2.weight", table.T if table is not None else None)
    if last is None:
        raise UserError("the weights have no embedding of time. Fix: name a checkpoint of a DALLE2-pytorch prior.")
    encodings = names.get("null_text_encodings")
    found: dict[str, Any] = {
        "dim": dim,
        "depth": max(depths) + 1,
        "n_head": names[BLOCK + "rel_pos_bias.relative_attention_bias.weight"].shape[1],
        "d_head": names[first + "0.null_kv"].shape[-1],
        "ff_mult": names[first + "1.5.weight"].shape[1] // dim,
        "max_text_len": 0 if encodings is None else encodings.shape[1],
        "continuous_time": table is None,
        "n_time_token": last.shape[0] // dim,
        "n_text_token": names["to_text_embeds.0.weight"].shape[0] // dim if "to_text_embeds.0.weight" in names else 1,
        "n_image_token": names["to_image_embeds.0.weight"].shape[0] // dim
        if "to_image_embeds.0.weight" in names
        else 1,
        "norm_in": BLOCK + "init_norm.g" in names,
        "norm_out": BLOCK + "norm.g" in names,
        "final_proj": BLOCK + "project_out.weight" in names,
        "normformer": first + "1.3.g" in names,
        "rotary": first + "0." + ROTARY in names,
        **release.settings,
    }
    if found["text_conditioning"] == "mask":  # any number of encodings works: the setting is a server's capacity
        found["max_text_len"] = settings.get("max_text_len", CLIP_TOKENS if settings.get("text_encodings") else 0)
    if noise is not None:
        found |= {"timesteps": len(noise), "schedule": schedule_of(np.asarray(noise))}
    elif table is not None:
        found["timesteps"] = len(table)
    for name, value in settings.items():
        if name in found and value != found[name]:
            raise invalid(f"model.{name}", value, f"{found[name]!r}, as the weights are", "leave it out")
    return PriorConfig(**{**settings, **found})


REQUIRED = {
    "learned_query": 1,
    BLOCK + "rel_pos_bias.relative_attention_bias.weight": 2,
    BLOCK + "layers.0.0.null_kv": 2,
    BLOCK + "layers.0.1.5.weight": 2,
}
"""Ranks of the weights that the settings are inferred from; these are in every network."""
OPTIONAL = {
    "to_time_embeds.0.weight": 2,
    "to_time_embeds.0.1.net.2.weight": 2,
    "null_text_encodings": 3,
    "to_text_embeds.0.weight": 2,
    "to_image_embeds.0.weight": 2,
}


def _check_ranks(weights: Mapping[str, np.ndarray]) -> None:
    fix = "Fix: name a checkpoint of a DALLE2-pytorch prior."
    for name, n_axes in {**REQUIRED, **OPTIONAL}.items():
        if name not in weights:
            if name in REQUIRED:
                raise UserError(f"the weights have no {name!r}. {fix}")
        elif weights[name].ndim != n_axes or (0 in weights[name].shape and name != "null_text_encodings"):
            raise UserError(f"{name} has shape {weights[name].shape}, not {n_axes} axes of at least 1. {fix}")


def schedule_of(found: Float[np.ndarray, " T"]) -> Schedule:
    for name in SCHEDULES:
        if np.allclose(betas(name, len(found)), found, rtol=1e-4, atol=1e-7):
            return name
    raise UserError(f"its noise schedule is none of {', '.join(SCHEDULES)}. Fix: none; Linnet does not know it.")
