"""Export of a trained model as one safetensors file, with the run's config and a fingerprint of both in its metadata."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from linnet.config.codec import CONFIG_VERSION, exported_from_dict
from linnet.config.schema import RunConfig
from linnet.core import quant
from linnet.core.errors import UserError, invalid
from linnet.core.files import parse_json, unwritable
from linnet.core.params import abstract
from linnet.core.pytree import leaf_name, named_leaves
from linnet.models import registry

FORMAT, TOKENIZER = "linnet", "tokenizer"
PAIR = ("weight", "scales")  # names of the two arrays of an 8-bit leaf


def export_safetensors(
    params: Any, buffers: Any, cfg_json: dict[str, Any], path: Path, tokenizer: dict[str, Any] | None = None
) -> str:
    """Write the file atomically, and return its fingerprint.

    `cfg_json` is the result of `config.codec.to_json`; `tokenizer` describes the run's tokenizer, which is not itself exported.
    """
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in named_leaves({"params": params, "buffers": buffers})}
    config = json.dumps(cfg_json, sort_keys=True)
    digest = fingerprint(arrays, config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise unwritable(path, error) from None
    os.close(handle)
    try:
        metadata = {"format": FORMAT, "config": config, "fingerprint": digest}
        save_file(
            arrays, temporary, metadata=metadata | ({} if tokenizer is None else {TOKENIZER: json.dumps(tokenizer)})
        )
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # safetensors wraps the OS error in its own
        raise unwritable(path, error) from None
    finally:
        Path(temporary).unlink(missing_ok=True)
    return digest


def import_safetensors(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return parameters, buffers and the config as JSON, bit-identical to the export. Raises if the file was changed."""
    arrays, metadata = _read(path)
    _check_format(path, metadata)
    if fingerprint(arrays, metadata["config"]) != metadata["fingerprint"]:
        raise UserError(f"{path} does not match its own fingerprint: it was changed or damaged. Fix: export it again.")
    try:
        cfg_json = parse_json(metadata["config"])
    except ValueError as error:
        raise UserError(f"{path}: its config is not JSON ({error}). Fix: export it again.") from None
    cfg = _run_config(cfg_json, path)
    family = registry.get(cfg.family)
    wanted = {"params": abstract(family.param_specs(cfg.model)), "buffers": abstract(family.buffer_specs(cfg.model))}
    tree = _fill(wanted, arrays, path)
    return tree["params"], tree["buffers"], cfg_json


def read_header(path: Path) -> tuple[RunConfig, str]:
    """Return the config and fingerprint of an exported file. Weights are not read, so the fingerprint is not verified."""
    _, metadata = _read(path, arrays=False)
    _check_format(path, metadata)
    return _run_config(json.loads(metadata["config"]), path), metadata["fingerprint"]


def check_trainable(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        is_quantized = any(file.get_slice(name).get_dtype() == "I8" for name in file.keys())  # noqa: SIM118
    if is_quantized:
        raise UserError(
            f"{path} has 8-bit weights, which cannot be trained: an update is smaller than their quantization step. Fix: train "
            "adapters on top of them with --lora.rank 8."
        )


def exported_tokenizer(path: Path) -> dict[str, Any] | None:
    """Return kind, fingerprint and rules of the exported run's tokenizer; None if the file does not record them."""
    try:
        with safe_open(path, framework="numpy") as file:
            tokenizer = json.loads((file.metadata() or {}).get(TOKENIZER, "null"))
    except (SafetensorError, OSError, ValueError):
        return None
    return tokenizer if isinstance(tokenizer, dict) else None


def is_float32(params: Any) -> bool:
    return all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def fingerprint(arrays: dict[str, np.ndarray], config: str) -> str:
    """SHA-256 over the config and every array's name, type, shape and bytes."""
    digest = hashlib.sha256(config.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _check_format(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("format") != FORMAT or not {"config", "fingerprint"} <= set(metadata):
        raise UserError(f"{path} was not written by Linnet. Fix: name a file made by `linnet export`.")


def _read(path: Path, arrays: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys() if arrays else ()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Fix: check the path.") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({error}). Fix: export it again.") from None


def _run_config(values: Any, path: Path) -> RunConfig:
    version = values.get("version") if isinstance(values, dict) else None
    if version != CONFIG_VERSION:
        raise invalid(f"version of the config in {path}", version, str(CONFIG_VERSION), "use the Linnet that wrote it")
    return exported_from_dict({name: value for name, value in values.items() if name != "version"})


def _fill(wanted: Any, arrays: dict[str, np.ndarray], path: Path) -> Any:
    pairs = {name: [f"{name}/{part}" for part in PAIR] for name, _ in named_leaves(wanted) if name not in arrays}
    names = {n for name, _ in named_leaves(wanted) for n in pairs.get(name, [name])}
    if names != set(arrays):
        odd = sorted(names ^ set(arrays))[0]
        raise UserError(f"{path} and its config disagree about {odd!r}. Fix: export it again.")

    def leaf(key: tuple[Any, ...], want: jax.ShapeDtypeStruct) -> quant.Weight:
        name = leaf_name(key)
        if name in pairs:
            weight, scales = (arrays[n] for n in pairs[name])
            if weight.shape != want.shape or (weight.dtype, scales.dtype) != (np.int8, jnp.bfloat16):
                raise invalid(f"{name} in {path}", weight.shape, f"an 8-bit pair of {want.shape}", "export it again")
            return quant.Quantized(weight=jnp.asarray(weight), scales=jnp.asarray(scales))
        got = arrays[name]
        if got.shape != want.shape or got.dtype not in (want.dtype, jnp.bfloat16):
            raise invalid(
                f"{name} in {path}", (got.shape, str(got.dtype)), f"{want.shape} {want.dtype}", "export it again"
            )
        return jnp.asarray(got)

    return jax.tree_util.tree_map_with_path(leaf, wanted)
