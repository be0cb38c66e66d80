"""Recompute Grok-1's unit goldens: RoPE, norm, activation, soft-cap, 8-bit matmul, sizes; and the checkpoint's tensor list."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.names import file_order
from linnet.convert.npz import read_npz
from linnet.core import quant
from linnet.core.errors import UserError
from linnet.core.quant import Quantized
from linnet.models.moe.config import MoEConfig, ffn_size
from linnet.nn.gqa import SoftCap, capped
from linnet.nn.moe import activation
from linnet.nn.norm import rms_norm_gain
from linnet.nn.positions import apply_rope
from linnet.verify.compare import Check, compare
from linnet.verify.moe.files import param_shapes, read_json
from linnet.verify.moe.sampling import recompute_sample, recompute_temperatures, recompute_top_p
from linnet.verify.recomputed import Recomputed

Arrays = dict[str, np.ndarray]
BFLOAT16_UNIT = 0.01  # one operation rounds once or twice
TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
BUCKETS = "Linnet pads no prompt to a bucket: it reads chunks of one size, each at the cost of its own tokens"
REASONS = {
    "pad_to_size": BUCKETS,
    "get_pad_bucket": BUCKETS,
    "qlinear_out_shape": "the reference's 8-bit product joins its leading axes; Linnet's keeps them",
    "plain_linear_out_shape": "the reference's 8-bit product joins its leading axes; Linnet's keeps them",
    "sample_f32_dtypes": "types of the reference's own results",
    "sample_bf16_dtypes": "types of the reference's own results",
    "top_p=0": "a nucleus of nothing may keep everything in the reference; Linnet asks for more than 0",
}
PLAIN = MoEConfig()


def recompute_units(path: Path, tolerance: float, recomputed: Recomputed) -> None:
    arrays = read_npz(path)
    groups: dict[str, Callable[[str, Arrays, float], tuple[Any, float] | None]] = {
        "rope": _rope,
        "rms": _rms,
        "gelu": _gelu,
        "softcap": _softcap,
        "qlinear": _qlinear,
    }
    for name, want in arrays.items():
        made = groups.get(name.partition("/")[0], _nothing)(name, arrays, tolerance)
        if made is not None:
            got, allowed = made
            recomputed.checks.append(compare(name, np.asarray(got, np.float32), want, allowed))
        elif not _is_input(name):
            handled = name.startswith(("top_p/", "sample/"))
            if not handled:
                recomputed.skipped[name] = "not an output that Linnet knows"
    recompute_top_p(arrays, tolerance, recomputed)
    recompute_sample(arrays, tolerance, recomputed)
    beside = path.with_suffix(".json")
    if beside.is_file():
        _sizes(beside, arrays, recomputed)


def _is_input(name: str) -> bool:
    return bool(re.fullmatch(r"rope/\d+/x(_bf16)?|(rms|gelu|softcap|qlinear)/(x|scale|weight|scales)", name))


def _nothing(name: str, arrays: Arrays, tolerance: float) -> None:
    del name, arrays, tolerance


def _allowed(kind: str, tolerance: float) -> float:
    return max(tolerance, BFLOAT16_UNIT) if kind == "bf16" else tolerance


def _rope(name: str, arrays: Arrays, tolerance: float) -> tuple[Any, float] | None:
    """Recompute RoPE. `off_A_B`: row 0 begins at position A, row 1 at B; `constN`: all are at N."""
    match = re.fullmatch(r"(rope/\d+)/(off|const)_?(\d+(?:_\d+)*)/(f32|bf16)", name)
    if match is None:
        return None
    folder, how, numbers, kind = match.groups()
    x = _get(arrays, f"{folder}/x_bf16" if kind == "bf16" else f"{folder}/x")
    first = np.asarray([int(n) for n in numbers.split("_")])[:, None]
    steps = np.arange(x.shape[1]) if how == "off" else np.zeros(x.shape[1], int)
    position = jnp.asarray(np.broadcast_to(first + steps, x.shape[:2]))
    return apply_rope(jnp.asarray(x, TYPES[kind]), position, PLAIN.rope_base), _allowed(kind, tolerance)


def _rms(name: str, arrays: Arrays, tolerance: float) -> tuple[Any, float] | None:
    kind = name.removeprefix("rms/")
    if kind not in TYPES:
        return None
    x, gain = jnp.asarray(_get(arrays, "rms/x"), TYPES[kind]), jnp.asarray(_get(arrays, "rms/scale"))
    return rms_norm_gain(x, gain), _allowed(kind, tolerance)


def _gelu(name: str, arrays: Arrays, tolerance: float) -> tuple[Any, float] | None:
    if name != "gelu/y":
        return None
    x = jnp.asarray(_get(arrays, "gelu/x"))
    return activation(x, jnp.ones_like(x)), tolerance


def _softcap(name: str, arrays: Arrays, tolerance: float) -> tuple[Any, float] | None:
    if name != "softcap/y":
        return None
    return capped(jnp.asarray(_get(arrays, "softcap/x")), SoftCap(scale=1.0, cap=PLAIN.score_cap)), tolerance


def _qlinear(name: str, arrays: Arrays, tolerance: float) -> tuple[Any, float] | None:
    """Recompute the 8-bit matmul. Uncompiled, the reference rounds the scaled weights to bfloat16."""
    match = re.fullmatch(r"qlinear/(f32|bf16)/(eager|jit)", name)
    if match is None:
        return None
    scales = jnp.asarray(_get(arrays, "qlinear/scales"), jnp.bfloat16)
    held = Quantized(weight=jnp.asarray(_get(arrays, "qlinear/weight")), scales=scales)
    x = jnp.asarray(_get(arrays, "qlinear/x"), TYPES[match[1]])
    rounded = quant.dequantize(held).astype(jnp.bfloat16)
    product = x @ rounded.astype(x.dtype) if match[2] == "eager" else quant.matmul(x, held)
    return product.reshape(-1, product.shape[-1]), _allowed(match[1], tolerance)


def _get(arrays: Arrays, name: str) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"the unit goldens have no {name!r}, which others need. Fix: write them again.")
    return arrays[name]


def _sizes(path: Path, arrays: Arrays, recomputed: Recomputed) -> None:
    listed = read_json(path)
    for name, value in listed.items():
        if name == "ffn_size":
            ours = [[width, widening, ffn_size(width, widening)] for width, widening, _ in value]
            recomputed.checks.append(
                compare(f"{path.name}: {name}", np.asarray(ours)[:, 2].astype(int), _third(value), 0.0)
            )
        elif name.startswith("sample_temperature_"):
            recompute_temperatures(f"{path.name}: {name}", float(name.rpartition("_")[2]), value, arrays, recomputed)
        else:
            reason = next((why for start, why in REASONS.items() if name.startswith(start)), None)
            recomputed.skipped[f"{path.name}: {name}"] = reason or "not a figure that Linnet knows"


def _third(rows: list[list[Any]]) -> np.ndarray:
    return np.asarray([row[2] for row in rows], int)


def recompute_order(path: Path, recomputed: Recomputed) -> None:
    """Compare names in file order, shapes, and the mesh axes over which the release shards each tensor."""
    listed = read_json(path)
    shapes = {str(row[1]): tuple(row[2]) for row in listed}
    cfg = _config_of(path, shapes)
    specs, order = param_shapes(cfg), file_order(cfg)
    ours = [
        [number, name, list(specs[w.leaf][0 if layer is None else 1 :]), w.splits]
        for number, (name, w, layer) in enumerate(order)
    ]
    theirs = [[row[0], row[1], row[2], _splits(str(row[4]), len(row[2]))] for row in listed]
    for part, at in (("numbers and names", slice(0, 2)), ("shapes", slice(2, 3)), ("partition", slice(3, 4))):
        wrong = [str(want) for mine, want in zip(ours, theirs, strict=False) if mine[at] != want[at]]
        n_wrong = len(wrong) + abs(len(ours) - len(theirs))
        note = f"{len(theirs)} tensors" if not n_wrong else (wrong or [f"{len(ours)} tensors, {len(theirs)} listed"])[0]
        recomputed.checks.append(Check(part, float(n_wrong), not n_wrong, note))
    recomputed.skipped["dtype"] = (
        "of the reference's freshly made weights; the checkpoint's own says what each file holds"
    )


def _splits(partition: str, rank: int) -> tuple[str | None, ...]:
    """Parse `PartitionSpec(None, 'data')`; trailing unsharded axes may be omitted."""
    axes = re.findall(r"\([^()]+\)|None|'\w+'", partition.removeprefix("PartitionSpec(").removesuffix(")"))
    found = [None if axis == "None" else "both" if axis.startswith("(") else axis.strip("'") for axis in axes]
    return tuple(found + [None] * (rank - len(found)))


def _config_of(path: Path, shapes: dict[str, tuple[int, ...]]) -> MoEConfig:
    """Return a model config with these shapes. The number of heads cannot be inferred, so there is one key head."""
    layer = "params/transformer/decoder_layer_0"
    try:
        vocab, width = shapes["params/language_model/in_out_embed/embeddings"]
        n_expert, _, hidden = shapes[f"{layer}/moe/linear/w"]
        query, key = (shapes[f"{layer}/multi_head_attention/{name}/w"][1] for name in ("query", "key"))
        numbers = [int(n[1]) for name in shapes if (n := re.match(r"params/transformer/decoder_layer_(\d+)/", name))]
        return MoEConfig(
            n_vocab=vocab,
            d_model=width,
            d_k=key,
            n_q_head=query // key,
            n_kv_head=1,
            n_layer=max(numbers) + 1,
            n_expert=n_expert,
            n_choice=1,
            widening=1.5 * hidden / width,
            end_id=0,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} does not list a Grok-1 model's tensors ({error}). Fix: write it again.") from None
