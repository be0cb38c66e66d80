"""The sizes of a Grok-1 model: the published ones, or those of a config.json with the names of the release or the conversions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from linnet.config import codec, presets
from linnet.core.errors import UserError, invalid
from linnet.core.files import read_json
from linnet.models.moe.config import MoEConfig

NAMES = {
    "vocab_size": "n_vocab",
    "emb_size": "d_model",
    "hidden_size": "d_model",
    "key_size": "d_k",
    "head_dim": "d_k",
    "num_q_heads": "n_q_head",
    "num_attention_heads": "n_q_head",
    "num_kv_heads": "n_kv_head",
    "num_key_value_heads": "n_kv_head",
    "num_layers": "n_layer",
    "num_hidden_layers": "n_layer",
    "num_experts": "n_expert",
    "num_selected_experts": "n_choice",
    "num_experts_per_tok": "n_choice",
    "widening_factor": "widening",
    "sequence_len": "context",
    "max_position_embeddings": "context",
    "embedding_multiplier_scale": "embed_scale",
    "output_multiplier_scale": "logit_scale",
    "attn_output_multiplier": "score_scale",
    "max_attn_value": "score_cap",
    "rope_theta": "rope_base",
    "pad_token": "pad_id",
    "pad_token_id": "pad_id",
    "eos_token": "end_id",
    "eos_token_id": "end_id",
}
HIDDEN = ("intermediate_size", "ffn_size")
FILE, CHECKPOINT = "config.json", "ckpt-0"


def find_settings(checkpoint: Path) -> Path | None:
    """Return a config.json in the checkpoint's folder, or beside ckpt-0."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    places = [folder, folder.parent] if folder.name == CHECKPOINT else [folder]
    return next((place / FILE for place in places if (place / FILE).is_file()), None)


def grok_config(settings: Path | None) -> MoEConfig:
    """Return the published config, updated from a file with any of the names above or Linnet's own; other names are ignored."""
    published = dataclasses.asdict(_published())
    return codec.from_dict(MoEConfig, published if settings is None else {**published, **_read(settings)}, "model.")


def _published() -> MoEConfig:
    model = presets.get("grok-1").model
    assert isinstance(model, MoEConfig)
    return dataclasses.replace(model, begin_id=None)  # the release feeds its tokenizer's ids unchanged


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}). Fix: check the path.") from None
    if not isinstance(found, dict):
        raise invalid(str(path), type(found).__name__, "an object of settings", "see the config.json of the checkpoint")
    # A run's config.json has the model under `model`; files written beside checkpoints may have it under `config`.
    nested = next((found[name] for name in ("config", "model") if isinstance(found.get(name), dict)), {})
    merged = {**{k: v for k, v in found.items() if not isinstance(v, dict)}, **nested}
    own = set(MoEConfig.__dataclass_fields__)
    values: dict[str, Any] = {}
    for name, value in merged.items():
        known = NAMES.get(name, name if name in own else None)
        if known is not None and value is not None:
            if known in values and values[known] != value:
                raise invalid(
                    f"{name} in {path}", value, f"{values[known]}, as set by another name", "keep one of them"
                )
            values[known] = value
    if not values:
        raise invalid(
            str(path), sorted(found)[:3], "an object with sizes such as emb_size", "name the model's config.json"
        )
    width, heads = values.get("d_model"), values.get("n_q_head")
    if "d_k" not in values and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        values["d_k"] = width // heads  # the conversions do not name it
    if "widening" not in values:
        values |= _widening(merged, values)
    return values


def _widening(merged: dict[str, Any], values: dict[str, Any]) -> dict[str, float]:
    """Return the widening factor that gives the hidden size of the file."""
    width = values.get("d_model", _published().d_model)
    for name in HIDDEN:
        if isinstance(merged.get(name), int) and isinstance(width, int) and width > 0:
            return {"widening": 1.5 * merged[name] / width}
    return {}
