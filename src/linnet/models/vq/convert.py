"""Conversion between the official Transformer-VQ's checkpoint tree (as '/'-joined names) and settings and Linnet's."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError, invalid
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import named_leaves
from linnet.models.vq.config import VQConfig
from linnet.models.vq.params import VQBuffers, VQParams, buffer_specs, param_specs

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
# Settings of the reference that do not affect what the model computes: data, sampling, notes of the file's author.
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
        # The other arguments of launch.py: paths, training, logging.
        "multihost",
        "command",
        "dataset",
        "data_dir",
        "vocab_path",
        "prng_seed",
        "grad_clip",
        "optimizer",
        "lr_max",
        "lr_schedule",
        "wd_lam",
        "n_warmup_step",
        "n_max_step",
        "n_extra_step",
        "n_print_step",
        "n_save_step",
        "n_eval_step",
        "n_save_keep",
        "in_checkpoint_dir",
        "out_checkpoint_dir",
        "model_name",
        "run_id",
    ]
)
NEEDED = ("n_vocab", "d_model", "d_k", "d_v", "n_head", "n_code", "n_layer", "block_len", "mem_len")
OUT_GAIN, OUT_NORM_BIAS, W_OUT, OUT_BIAS = "out_ln/g", "out_ln/b", "out_proj/kernel", "out_proj/bias"


def unit_name(index: int) -> str:
    """Return the reference's name of a unit; a layer of the reference is a pair of units."""
    return f"transformer_layers_{index // 2}/scanned_attn{index % 2 + 1}"


def from_reference(tree: Tree, cfg: VQConfig) -> tuple[VQParams, VQBuffers]:
    """Convert the reference's weights to Linnet's, after checking every shape against `cfg`."""
    _check_extensions(cfg)
    _check_tree(tree, {name: spec.layer_shape for name, spec in _reference_specs(cfg).items()})
    params = params_from_leaves(leaves_from_reference(tree, cfg), cfg)

    def stack(name: str) -> jax.Array:
        return jnp.stack([jnp.asarray(tree[f"{unit_name(i)}/{name}"], jnp.float32) for i in range(cfg.n_unit)])

    return params, VQBuffers(**{field: stack(name) for field, name in CODE_NAMES.items()})


def _check_extensions(cfg: VQConfig) -> None:
    for name, value in (("n_expert", cfg.n_expert), ("d_condition", cfg.d_condition)):
        if value:
            raise invalid(f"model.{name}", value, "0: the reference has no place for these weights", "use safetensors")


def _check_tree(tree: Tree, wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(wanted) - set(tree))
    if missing:
        raise invalid(
            "the weights", f"missing {_some(missing)}", "the whole tree of the official checkpoint", "export it again"
        )
    extra = sorted(set(tree) - set(wanted) - {TIED_BIAS})
    if extra:
        raise invalid(
            "the weights", f"also {_some(extra)}", "those of the model in the config only", "check the config"
        )
    for name, shape in wanted.items():
        if tree[name].shape != shape:
            raise invalid(f"the shape of {name}", tree[name].shape, f"{shape}", "check the sizes in the config")


def reference_leaves(cfg: VQConfig) -> dict[str, tuple[str, int | None]]:
    """Map the reference's name of every trained parameter to the name of Linnet's leaf and the unit within it."""
    names: dict[str, tuple[str, int | None]] = {EMBED: ("embed", None)}
    if cfg.pe_abs:
        names[SCALE] = ("position_scale", None)
    if cfg.e_preln:
        names |= {OUT_GAIN: ("out_gain", None), OUT_NORM_BIAS: ("out_norm_bias", None)}
    if not cfg.e_tie:
        names[W_OUT] = ("w_out", None)
    names[TIED_BIAS if cfg.e_tie else OUT_BIAS] = ("out_bias", None)
    for i in range(cfg.n_unit):
        names |= {f"{unit_name(i)}/{name}": (f"units/{field}", i) for field, name in UNIT_NAMES.items()}
    return names


def leaves_from_reference(tree: Tree, cfg: VQConfig) -> dict[str, np.ndarray]:
    """Convert arrays keyed by the reference's names to Linnet's leaf names, with units stacked. Arrays may have any shape, so this
    also converts optimizer state."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, (leaf, _) in reference_leaves(cfg).items():
        stacks.setdefault(leaf, []).append(np.asarray(tree[name]))
    return {leaf: np.stack(parts) if leaf.startswith("units/") else parts[0] for leaf, parts in stacks.items()}


def leaves_to_reference(leaves: Mapping[str, Any], cfg: VQConfig) -> dict[str, np.ndarray]:
    """Inverse of `leaves_from_reference`."""
    return {
        name: np.asarray(leaves[leaf] if unit is None else leaves[leaf][unit])
        for name, (leaf, unit) in reference_leaves(cfg).items()
    }


def params_from_leaves(leaves: Mapping[str, Any], cfg: VQConfig, dtype: Any = jnp.float32) -> VQParams:
    specs = param_specs(cfg)
    values = [jnp.asarray(leaves[name], dtype) for name, _ in named_leaves(specs, is_spec)]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), values)


def to_reference(params: VQParams, buffers: VQBuffers | None, cfg: VQConfig) -> dict[str, np.ndarray]:
    """Convert weights, or gradients (without buffers), to the reference's tree. The unused bias of an untied model is zero."""
    _check_extensions(cfg)
    tree = leaves_to_reference(dict(named_leaves(params)), cfg)
    tree.setdefault(TIED_BIAS, np.zeros(cfg.n_vocab, np.float32))
    if buffers is not None:
        for field, name in CODE_NAMES.items():
            stacked = np.asarray(getattr(buffers, field))
            tree |= {f"{unit_name(i)}/{name}": stacked[i] for i in range(cfg.n_unit)}
    return tree


def infer_config(tree: Tree) -> dict[str, Any]:
    """Infer all settings that the shapes determine. The user must give the others (window, block, output scale)."""
    layers = {int(m[1]) for name in tree if (m := re.match(r"transformer_layers_(\d+)/", name))}
    if not layers or EMBED not in tree:
        raise UserError(
            "these weights are not a Transformer-VQ tree: they need 'token_embedder/embs' and 'transformer_layers_N/..', got "
            f"{_some(sorted(tree))}. Fix: name the official checkpoint file, or an .npz of its '/'-joined names."
        )
    if layers != set(range(max(layers) + 1)):
        raise invalid("the layers in the weights", sorted(layers), "0, 1, 2, .. without a gap", "export them again")
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
    """Convert the reference's settings, which write switches as 0 and 1. An unknown setting may change the result, so it is an error
    unless the caller checks the results (`ignore_unknown`)."""
    fields = {f.name for f in dataclasses.fields(VQConfig)}
    unknown = unknown_settings(settings)
    if unknown and not ignore_unknown:
        raise invalid("the settings of the model", f"also {_some(unknown)}", "those of the reference", "remove them")
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise invalid("the settings of the model", f"missing {_some(missing)}", "whole", "write them to the file")
    if settings.get("param_dtype", "float32") != "float32":
        raise invalid("param_dtype", settings["param_dtype"], "float32", "convert the weights")
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
    if typing.get_origin(hint) is typing.Union and (value is None or isinstance(value, int | str)):
        return value  # begin_id, which the config itself validates
    needs = {bool: "0 or 1", int: "a whole number", float: "a number"}.get(hint, f"one of {typing.get_args(hint)}")
    raise invalid(f"the setting {name}", value, needs, "correct it in the file")


def _reference_specs(cfg: VQConfig) -> dict[str, Spec]:
    params, buffers = dict(named_leaves(param_specs(cfg), is_spec)), buffer_specs(cfg)
    named = {name: params[leaf] for name, (leaf, _) in reference_leaves(cfg).items()}
    for i in range(cfg.n_unit):
        named |= {f"{unit_name(i)}/{name}": getattr(buffers, field) for field, name in CODE_NAMES.items()}
    return named


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
