"""Conversion between this family's weights and the reference's state dict, with its current or older names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import named_leaves
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.params import PriorParams, param_specs
from linnet.nn.positions import interleaved_rope_frequencies

BLOCK = "causal_transformer."
ATTENTION, FORWARD = BLOCK + "layers.{i}.0.", BLOCK + "layers.{i}.1."
# Linnet's name -> the reference's, where matrices are stored output-major; {i} is the layer index.
NAMES = {
    "query": "learned_query",
    "null_encodings": "null_text_encodings",
    "null_text": "null_text_embeds",
    "null_image": "null_image_embed",
    "time": "to_time_embeds.0.weight",
    "time/first/w": "to_time_embeds.0.1.net.0.0.weight",
    "time/first/b": "to_time_embeds.0.1.net.0.0.bias",
    "time/second/w": "to_time_embeds.0.1.net.1.0.weight",
    "time/second/b": "to_time_embeds.0.1.net.1.0.bias",
    "time/out/w": "to_time_embeds.0.1.net.2.weight",
    "time/out/b": "to_time_embeds.0.1.net.2.bias",
    "text_tokens/w": "to_text_embeds.0.weight",
    "text_tokens/b": "to_text_embeds.0.bias",
    "image_tokens/w": "to_image_embeds.0.weight",
    "image_tokens/b": "to_image_embeds.0.bias",
    "bias": BLOCK + "rel_pos_bias.relative_attention_bias.weight",
    "in_gain": BLOCK + "init_norm.g",
    "out_gain": BLOCK + "norm.g",
    "w_proj": BLOCK + "project_out.weight",
    "layers/attention_gain": ATTENTION + "norm.g",
    "layers/null_kv": ATTENTION + "null_kv",
    "layers/w_q": ATTENTION + "to_q.weight",
    "layers/w_kv": ATTENTION + "to_kv.weight",
    "layers/w_out": ATTENTION + "to_out.0.weight",
    "layers/out_gain": ATTENTION + "to_out.1.g",
    "layers/ff_gain": FORWARD + "0.g",
    "layers/w_in": FORWARD + "1.weight",
    "layers/mid_gain": FORWARD + "3.g",
    "layers/w_back": FORWARD + "5.weight",
}
LOOKED_UP = ("time", "bias")  # tables indexed by row, which are not transposed
PADDING = "null_text_embed"  # the reference's name of null_encodings in releases where they replace padding only
ROTARY = "rotary_emb.freqs"
LEADING_ONE = ("null_encodings", "null_text")  # the reference has a leading batch axis


def current_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a state dict of any version to the current names. Old norms had a gain named gamma and a shift that was always 0."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name.endswith(".beta"):
            if np.any(np.asarray(value) != 0):
                raise UserError(f"{name} is a norm's shift and not 0, which no version of the reference trains.")
            continue
        if name.endswith(".gamma"):
            name = name.removesuffix("gamma") + "g"
        found["null_text_encodings" if name == PADDING else name] = value
    return found


def from_reference(state: Mapping[str, Any], cfg: PriorConfig) -> PriorParams:
    """Convert the network's weights. All must be present with the shapes of the config, and none may be left over."""
    state, specs = current_names(state), param_specs(cfg)
    left = dict(state)
    leaves = [_take(left, name, spec) for name, spec in named_leaves(specs, is_leaf=is_spec)]
    for name in [name for name in left if name.endswith(ROTARY)]:
        expected = interleaved_rope_frequencies(cfg.n_rotated)
        found = np.asarray(left.pop(name), np.float32)
        if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5):
            raise UserError(f"{name} has other frequencies than the reference's, which Linnet does not know.")
    if left:
        raise UserError(
            f"the weights have {next(iter(left))!r} (and {len(left) - 1} more) that these settings do not use. "
            "Fix: check the settings of the network."
        )
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def to_reference(params: PriorParams, cfg: PriorConfig) -> dict[str, np.ndarray]:
    """Return the state dict as the reference would save it, including rotary frequencies, with the names of the release that computes
    the same function."""
    found: dict[str, np.ndarray] = {}
    for (name, spec), (_, leaf) in zip(
        named_leaves(param_specs(cfg), is_leaf=is_spec), named_leaves(params), strict=True
    ):
        values = np.asarray(leaf)
        for i, value in enumerate(values) if spec.stack_shape else [(0, values)]:
            theirs = PADDING if name == "null_encodings" and not cfg.can_drop_text else _named(name)
            found[theirs.format(i=i)] = _turned(name, value)[None] if name in LEADING_ONE else _turned(name, value)
    if cfg.n_rotated:
        for i in range(cfg.depth):
            found[ATTENTION.format(i=i) + ROTARY] = interleaved_rope_frequencies(cfg.n_rotated)
    return found


def _take(left: dict[str, Any], name: str, spec: Spec) -> Any:
    count = spec.stack_shape[0] if spec.stack_shape else 1
    values = []
    for i in range(count):
        theirs = _named(name).format(i=i)
        if theirs not in left:
            raise UserError(f"the weights have no {theirs!r}. Fix: check the settings of the network.")
        value = np.asarray(left.pop(theirs), np.float32)
        value = _turned(name, value[0] if name in LEADING_ONE and value.ndim == 3 else value)
        if value.shape != spec.layer_shape:
            raise UserError(
                f"{theirs} has shape {value.shape}, but the settings ask for {spec.layer_shape}. "
                "Fix: check the settings of the network."
            )
        values.append(value)
    return jnp.asarray(np.stack(values) if spec.stack_shape else values[0])


def _named(name: str) -> str:
    if name not in NAMES:
        raise UserError(f"the reference has no weight for {name}: its text is as wide as its images.")
    return NAMES[name]


def _turned(name: str, value: np.ndarray) -> np.ndarray:
    is_matrix = name.split("/")[-1].startswith("w") or name.endswith("/w")
    return value.T if is_matrix and name not in LOOKED_UP else value
