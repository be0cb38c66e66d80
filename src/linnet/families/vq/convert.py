"""The official Transformer-VQ's checkpoint tree (as '/'-joined names) and settings, to Linnet's and back."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import UserError, refuse
from linnet.families.vq.config import VQConfig
from linnet.families.vq.params import UnitParams, VQBuffers, VQParams, buffer_specs, param_specs
from linnet.params import Spec, is_spec

Tree = Mapping[str, np.ndarray]

# Linnet's field -> the reference's name within a unit
UNIT_NAMES = {
    "norm_gain": "input_ln/g",
    "norm_bias": "input_ln/b",
    "w_q": "q_proj/kernel",
    "w_kvg": "kvg_proj/kernel",
    "w_r": "r_proj/kernel",
    "w_res": "res_proj/kernel",
    "u": "u",
    "w": "v",
}
CODE_NAMES = {"code_count": "quantizer/c_count", "code_total": "quantizer/c_sum"}
EMBED, TIED_BIAS, SCALE = "token_embedder/embs", "token_embedder/bias_out", "position_embedder/scale"
# The reference's settings that say nothing about what the model computes: data, sampling, notes of whoever wrote the file.
NOT_THE_MODEL = frozenset(
    [
        "global_batch_size",
        "sequence_len",
        "update_len",
        "d_ff",
        "p_nucleus",
        "is_train",
        "eos_id",
        "opt",
        "params_file",
        "note",
        "perturb_seed",
        "min_shortcode_margin",
    ]
)
NEEDED = ("n_vocab", "d_model", "d_k", "d_v", "n_head", "n_code", "n_layer", "block_len", "mem_len")
OUT_GAIN, OUT_NORM_BIAS, W_OUT, OUT_BIAS = "out_ln/g", "out_ln/b", "out_proj/kernel", "out_proj/bias"


def unit_name(index: int) -> str:
    """A layer of the reference is a pair of units."""
    return f"transformer_layers_{index // 2}/scanned_attn{index % 2 + 1}"


def from_reference(tree: Tree, cfg: VQConfig) -> tuple[VQParams, VQBuffers]:
    """Linnet's weights from the reference's, every shape checked against `cfg` first."""
    wanted = {name: spec.layer_shape for name, spec in _reference_specs(cfg).items()}
    missing = sorted(set(wanted) - set(tree))
    if missing:
        raise refuse(
            "the weights", f"missing {_some(missing)}", "the whole tree of the official checkpoint", "export it again"
        )
    extra = sorted(set(tree) - set(wanted) - {TIED_BIAS})
    if extra:
        raise refuse("the weights", f"also {_some(extra)}", "those of the model in the config only", "check the config")
    for name, shape in wanted.items():
        if tree[name].shape != shape:
            raise refuse(f"the shape of {name}", tree[name].shape, f"{shape}", "check the sizes in the config")

    def get(name: str) -> jax.Array:
        return jnp.asarray(tree[name], jnp.float32)

    def stack(name: str) -> jax.Array:
        return jnp.stack([get(f"{unit_name(i)}/{name}") for i in range(cfg.n_unit)])

    params = VQParams(
        embed=get(EMBED),
        position_scale=get(SCALE) if cfg.pe_abs else None,
        units=UnitParams(**{field: stack(name) for field, name in UNIT_NAMES.items()}),
        out_gain=get(OUT_GAIN) if cfg.e_preln else None,
        out_norm_bias=get(OUT_NORM_BIAS) if cfg.e_preln else None,
        w_out=None if cfg.e_tie else get(W_OUT),
        out_bias=get(TIED_BIAS if cfg.e_tie else OUT_BIAS),
    )
    return params, VQBuffers(**{field: stack(name) for field, name in CODE_NAMES.items()})


def to_reference(params: VQParams, buffers: VQBuffers | None, cfg: VQConfig) -> dict[str, np.ndarray]:
    """The reference's tree. Its unused bias of an untied model is zero. Also takes gradients (without buffers)."""
    for name, value in (("n_expert", cfg.n_expert), ("d_condition", cfg.d_condition)):
        if value:
            raise refuse(f"model.{name}", value, "0: the reference has no place for these weights", "use safetensors")
    tree = {EMBED: params.embed, TIED_BIAS: params.out_bias if cfg.e_tie else jnp.zeros_like(params.out_bias)}
    if cfg.pe_abs:
        tree[SCALE] = params.position_scale
    if cfg.e_preln:
        tree |= {OUT_GAIN: params.out_gain, OUT_NORM_BIAS: params.out_norm_bias}
    if not cfg.e_tie:
        tree |= {W_OUT: params.w_out, OUT_BIAS: params.out_bias}
    for i in range(cfg.n_unit):
        tree |= {f"{unit_name(i)}/{name}": getattr(params.units, field)[i] for field, name in UNIT_NAMES.items()}
        if buffers is not None:
            tree |= {f"{unit_name(i)}/{name}": getattr(buffers, field)[i] for field, name in CODE_NAMES.items()}
    return {name: np.asarray(value) for name, value in tree.items()}


def infer_config(tree: Tree) -> dict[str, Any]:
    """All settings that the shapes tell. What they cannot tell (window, block, output scale) the user must say."""
    layers = {int(m[1]) for name in tree if (m := re.match(r"transformer_layers_(\d+)/", name))}
    if not layers or EMBED not in tree:
        raise UserError(
            "these weights are not a Transformer-VQ tree: they need 'token_embedder/embs' and 'transformer_layers_N/..', got "
            f"{_some(sorted(tree))}. Fix: name the official checkpoint file, or an .npz of its '/'-joined names."
        )
    if layers != set(range(max(layers) + 1)):
        raise refuse("the layers in the weights", sorted(layers), "0, 1, 2, .. without a gap", "export them again")
    try:
        n_head, n_code, d_k = tree[f"{unit_name(0)}/{CODE_NAMES['code_total']}"].shape
        d_v = tree[f"{unit_name(0)}/{UNIT_NAMES['w_res']}"].shape[0] // n_head
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the first unit of the weights is not whole ({error}). Fix: export the checkpoint again."
        ) from None
    n_vocab, d_model = tree[EMBED].shape
    return {
        "n_vocab": n_vocab,
        "d_model": d_model,
        "d_k": d_k,
        "d_v": d_v,
        "n_head": n_head,
        "n_code": n_code,
        "n_layer": len(layers),
        "pe_abs": SCALE in tree,
        "e_tie": W_OUT not in tree,
        "e_preln": OUT_GAIN in tree,
    }


def config_from_reference(settings: Mapping[str, Any], *, ignore_unknown: bool = False) -> VQConfig:
    """The reference writes switches as 0 and 1. A setting that we do not know may change the result, so it is refused
    (a caller who checks the results may ignore it)."""
    fields = {f.name for f in dataclasses.fields(VQConfig)}
    unknown = unknown_settings(settings)
    if unknown and not ignore_unknown:
        raise refuse("the settings of the model", f"also {_some(unknown)}", "those of the reference", "remove them")
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise refuse("the settings of the model", f"missing {_some(missing)}", "whole", "write them to the file")
    if settings.get("param_dtype", "float32") != "float32":
        raise refuse("param_dtype", settings["param_dtype"], "float32", "convert the weights")
    hints = typing.get_type_hints(VQConfig)
    return VQConfig(**{name: _setting(name, hints[name], settings[name]) for name in fields & set(settings)})


def unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    fields = {f.name for f in dataclasses.fields(VQConfig)}
    return sorted(set(settings) - fields - NOT_THE_MODEL - {"param_dtype"})


def _setting(name: str, hint: Any, value: Any) -> Any:
    number = isinstance(value, int | float)
    if hint is bool and number and value in (0, 1):
        return bool(value)
    if hint is int and number and not isinstance(value, bool) and value == int(value):
        return int(value)
    if hint is float and number and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is typing.Literal and value in typing.get_args(hint):
        return value
    needs = {bool: "0 or 1", int: "a whole number", float: "a number"}.get(hint, f"one of {typing.get_args(hint)}")
    raise refuse(f"the setting {name}", value, needs, "correct it in the file")


def _reference_specs(cfg: VQConfig) -> dict[str, Spec]:
    params: VQParams = param_specs(cfg)
    buffers = buffer_specs(cfg)
    named = {
        EMBED: params.embed,
        SCALE: params.position_scale,
        OUT_GAIN: params.out_gain,
        OUT_NORM_BIAS: params.out_norm_bias,
        W_OUT: params.w_out,
        (TIED_BIAS if cfg.e_tie else OUT_BIAS): params.out_bias,
    }
    for i in range(cfg.n_unit):
        named |= {f"{unit_name(i)}/{name}": getattr(params.units, field) for field, name in UNIT_NAMES.items()}
        named |= {f"{unit_name(i)}/{name}": getattr(buffers, field) for field, name in CODE_NAMES.items()}
    return {name: spec for name, spec in named.items() if is_spec(spec)}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
