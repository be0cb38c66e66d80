"""Grok-1 as safetensors under the names of its Hugging Face conversions: reads both naming schemes and writes the first.

They have one matrix per expert, stored as [outputs, inputs], and floats instead of 8-bit pairs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.leaves import FLOATS, Tensor, Tensors, specs_by_name
from linnet.convert.grok.names import BY_LEAF, HEAD, WEIGHTS, Weight, add_suffix, converted_name, find_scheme
from linnet.core import quant
from linnet.core.errors import UserError, invalid
from linnet.core.files import read_json
from linnet.core.pytree import named_leaves
from linnet.models.moe.config import MoEConfig
from linnet.runs.stored_array import Leaf, StoredArray, read_safetensors, write_safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000  # bytes; the usual file size of conversions


def is_conversion(path: Path) -> bool:
    return path.suffix == ".safetensors" or (path / INDEX).is_file() or (path / SINGLE).is_file()


# Reading.


def read_conversion(path: Path, cfg: MoEConfig) -> Tensors:
    """Check every tensor against the config before any is read."""
    arrays = _arrays(path)
    scheme = find_scheme(arrays, str(path))
    specs, used, found = specs_by_name(cfg), set[str](), dict[str, list[Tensor]]()
    for weight in WEIGHTS:
        spec = specs[weight.leaf]
        layers = range(cfg.n_layer) if weight.in_layer else [None]
        experts = range(cfg.n_expert) if weight.kind == "experts" else [None]
        shape = spec.shape[int(weight.in_layer) + int(weight.kind == "experts") :]
        for layer in layers:
            for expert in experts:
                name = converted_name(weight, scheme, layer, expert)
                used.add(name)
                found.setdefault(weight.leaf, []).append(_tensor(path, arrays, name, weight, shape))
    extra = sorted(set(arrays) - used - {HEAD})
    if extra:
        raise UserError(
            f"{path} has {extra[0]!r} ({len(extra)} extra), which a model of {cfg.n_layer} layers and {cfg.n_expert} experts "
            "does not have. Fix: give the model's sizes with --settings."
        )
    if HEAD in arrays:
        _check_tied(path, arrays[HEAD], arrays[converted_name(BY_LEAF["embed"], scheme, None)])
    return found


def conversion_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return _indexed(path) if (path / INDEX).is_file() else [path / SINGLE]


def _arrays(path: Path) -> dict[str, StoredArray]:
    arrays: dict[str, StoredArray] = {}
    for file in conversion_files(path):
        for name, array in read_safetensors(file)[0].items():
            if add_suffix(name) in arrays:
                raise UserError(
                    f"{file} has {name!r}, which another file has too. Fix: keep the files of one conversion."
                )
            arrays[add_suffix(name)] = array
    return arrays


def _indexed(path: Path) -> list[Path]:
    try:
        names = set(read_json(path / INDEX)["weight_map"].values())
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("a file's name is not plain")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / INDEX} is not an index of safetensors ({error}). Fix: download it again.") from None
    return [path / name for name in sorted(names)]


def _tensor(path: Path, arrays: dict[str, StoredArray], name: str, weight: Weight, shape: tuple[int, ...]) -> Tensor:
    array, transposed = arrays.get(name), weight.kind in ("matrix", "experts")
    if array is None:
        raise UserError(f"{path} has no {name!r}. Fix: download what is missing, or give the sizes with --settings.")
    wanted = shape[::-1] if transposed else shape
    if array.shape != wanted:
        raise invalid(f"{name} in {array.path}", array.shape, f"{wanted}", "give the model's sizes with --settings")
    if array.dtype not in FLOATS:
        raise invalid(
            f"{name} in {array.path}", str(array.dtype), "of floats", "use a conversion without 8-bit weights"
        )

    def read() -> np.ndarray:
        values = array.read()
        return np.ascontiguousarray(values.T) if transposed else values

    return Tensor(label=f"{array.path.name} ({name})", shape=shape, dtype=array.dtype, read=read)


def _check_tied(path: Path, head: StoredArray, embed: StoredArray) -> None:
    """Check that the head equals the embedding: Grok-1 ties them, so a separate head would be lost."""
    alike = head.shape == embed.shape and head.dtype == embed.dtype
    if not (alike and head.sha256() == embed.sha256()):
        raise invalid(f"{HEAD} in {path}", "not the embedding", "the same as it", "use weights whose head is tied")


# Writing.


def export_conversion(params: Any, cfg: MoEConfig, out: Path, largest: int = MAX_FILE_BYTES) -> int:
    """Write scheme (1) to a new folder with an index and a config.json with the model's sizes; returns the number of files.

    8-bit weights become float32, which represents them exactly.
    """
    if out.exists():
        raise UserError(f"{out} already exists, and nothing is overwritten. Fix: choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        files = _group_files(list(_leaves(params, cfg)), largest)
        index: dict[str, str] = {}
        for i, leaves in enumerate(files):
            name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            write_safetensors(part / name, leaves, {"format": "pt"})
            index |= {leaf.name: name for leaf in leaves}
        total = sum(leaf.nbytes for leaves in files for leaf in leaves)
        described = {"metadata": {"total_size": total}, "weight_map": index}
        (part / INDEX).write_text(json.dumps(described, indent=1) + "\n")
        (part / "config.json").write_text(json.dumps(_sizes(cfg), indent=1) + "\n")
        os.rename(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return len(files)


def _leaves(params: Any, cfg: MoEConfig) -> Iterator[Leaf]:
    leaves = dict(named_leaves(params, is_leaf=quant.is_quantized))
    for weight in WEIGHTS:
        value, transposed = leaves[weight.leaf], weight.kind in ("matrix", "experts")
        for layer in range(cfg.n_layer) if weight.in_layer else [None]:
            for expert in range(cfg.n_expert) if weight.kind == "experts" else [None]:
                index = tuple(i for i in (layer, expert) if i is not None)
                shape = value.shape[len(index) :]
                dtype = np.dtype("float32") if quant.is_quantized(value) else np.dtype(value.dtype)
                yield Leaf(
                    name=converted_name(weight, "decoder_layer", layer, expert),
                    shape=shape[::-1] if transposed else shape,
                    dtype=dtype,
                    parts=_read_matrix(value, index, transposed),
                )


def _read_matrix(value: Any, index: tuple[int, ...], transposed: bool) -> Callable[[], Iterator[np.ndarray]]:
    def parts() -> Iterator[np.ndarray]:
        if quant.is_quantized(value):
            one = quant.Quantized(weight=value.weight[index], scales=value.scales[index])
            matrix = np.asarray(quant.dequantize(one, jnp.float32))
        else:
            matrix = np.asarray(value[index])
        yield np.ascontiguousarray(matrix.T) if transposed else matrix

    return parts


def _group_files(leaves: list[Leaf], largest: int) -> list[list[Leaf]]:
    files: list[list[Leaf]] = [[]]
    for leaf in leaves:
        if files[-1] and sum(other.nbytes for other in files[-1]) + leaf.nbytes > largest:
            files.append([])
        files[-1].append(leaf)
    return files


def _sizes(cfg: MoEConfig) -> dict[str, Any]:
    return {
        "model_type": "grok-1",
        "vocab_size": cfg.n_vocab,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ffn,
        "head_dim": cfg.d_k,
        "num_attention_heads": cfg.n_q_head,
        "num_key_value_heads": cfg.n_kv_head,
        "num_hidden_layers": cfg.n_layer,
        "num_experts": cfg.n_expert,
        "num_experts_per_tok": cfg.n_choice,
        "max_position_embeddings": cfg.context,
        "embedding_multiplier_scale": cfg.embed_scale,
        "output_multiplier_scale": cfg.logit_scale,
        "attn_output_multiplier": cfg.score_scale,
        "max_attn_value": cfg.score_cap,
        "rope_theta": cfg.rope_base,
        "pad_token_id": cfg.pad_id,
        "eos_token_id": cfg.end_id,
        "begin_id": cfg.begin_id,  # Linnet's own name: bos_token_id does not tell whether the model reads it
    }
