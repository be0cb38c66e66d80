"""Recompute Grok-1's unit goldens: RoPE, norm, activation, soft-cap, 8-bit matmul, sizes; and the checkpoint's tensor list."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.convert.grok.names import file_order
from linnet.core import quant
from linnet.core.errors import UserError
from linnet.core.quant import Quantized
from linnet.models.moe.config import MoEConfig, ffn_size
from linnet.nn.gqa import SoftCap, capped
from linnet.nn.moe import activation
from linnet.nn.norm import rms_norm_gain
from linnet.nn.positions import apply_rope
from linnet.verify.compare import Check
from linnet.verify.golden import Arrays, Golden
from linnet.verify.moe.files import param_shapes, read_grok_golden, read_json
from linnet.verify.moe.sampling import NO_NUCLEUS, recompute_sample, recompute_temperatures, recompute_top_p
from linnet.verify.recomputed import UNKNOWN, Recomputed

BFLOAT16_UNIT = 0.01  # one operation rounds once or twice
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
BUCKETS = "Linnet does not pad prompts to buckets: it prefills in chunks of one size, which cost only their own tokens"
AXES = "the reference's 8-bit product joins its leading axes; Linnet's keeps them"
REASONS = {
    "pad_to_size": BUCKETS,
    "get_pad_bucket": BUCKETS,
    "qlinear_out_shape": AXES,
    "plain_linear_out_shape": AXES,
    "sample_f32_dtypes": "dtypes of the reference's own results",
    "sample_bf16_dtypes": "dtypes of the reference's own results",
    "top_p=0": NO_NUCLEUS,
}
PLAIN = MoEConfig()


def recompute_units(path: Path, tolerance: float, recomputed: Recomputed) -> None:
    golden = read_grok_golden(path, "units")
    for name, want in golden.arrays.items():
        for pattern, compute in UNITS.items():
            if match := re.fullmatch(pattern, name):
                is_bfloat16 = match.groupdict().get("dtype") == "bf16"
                allowed = max(tolerance, BFLOAT16_UNIT) if is_bfloat16 else tolerance
                recomputed.compare(name, np.asarray(compute(golden, match), np.float32), want, allowed)
                break
        else:
            if not INPUTS.fullmatch(name) and not name.startswith(("top_p/", "sample/")):
                recomputed.skipped[name] = UNKNOWN
    recompute_top_p(golden.arrays, tolerance, recomputed)
    recompute_sample(golden.arrays, tolerance, recomputed)
    beside = path.with_suffix(".json")
    if beside.is_file():
        _compare_sizes(beside, golden.arrays, recomputed)


def _rope(golden: Golden, match: re.Match[str]) -> Any:
    """Recompute RoPE. `off_A_B`: row 0 begins at position A, row 1 at B; `constN`: all are at N."""
    folder, how, numbers, dtype = match.groups()
    x = golden.get(f"{folder}/x_bf16" if dtype == "bf16" else f"{folder}/x")
    first = np.asarray([int(n) for n in numbers.split("_")])[:, None]
    steps = np.arange(x.shape[1]) if how == "off" else np.zeros(x.shape[1], int)
    position = jnp.asarray(np.broadcast_to(first + steps, x.shape[:2]))
    return apply_rope(jnp.asarray(x, DTYPES[dtype]), position, PLAIN.rope_base)


def _rms(golden: Golden, match: re.Match[str]) -> Any:
    return rms_norm_gain(jnp.asarray(golden.get("rms/x"), DTYPES[match[1]]), jnp.asarray(golden.get("rms/scale")))


def _gelu(golden: Golden, match: re.Match[str]) -> Any:
    del match
    x = jnp.asarray(golden.get("gelu/x"))
    return activation(x, jnp.ones_like(x))


def _softcap(golden: Golden, match: re.Match[str]) -> Any:
    del match
    return capped(jnp.asarray(golden.get("softcap/x")), SoftCap(scale=1.0, cap=PLAIN.score_cap))


def _qlinear(golden: Golden, match: re.Match[str]) -> Any:
    """Recompute the 8-bit matmul. Uncompiled, the reference rounds the scaled weights to bfloat16."""
    scales = jnp.asarray(golden.get("qlinear/scales"), jnp.bfloat16)
    weight = Quantized(weight=jnp.asarray(golden.get("qlinear/weight")), scales=scales)
    x = jnp.asarray(golden.get("qlinear/x"), DTYPES[match[1]])
    rounded = quant.dequantize(weight).astype(jnp.bfloat16)
    product = x @ rounded.astype(x.dtype) if match[2] == "eager" else quant.matmul(x, weight)
    return product.reshape(-1, product.shape[-1])


UNITS: dict[str, Callable[[Golden, re.Match[str]], Any]] = {
    r"(rope/\d+)/(off|const)_?(\d+(?:_\d+)*)/(?P<dtype>f32|bf16)": _rope,
    r"rms/(?P<dtype>f32|bf16)": _rms,
    r"gelu/y": _gelu,
    r"softcap/y": _softcap,
    r"qlinear/(?P<dtype>f32|bf16)/(eager|jit)": _qlinear,
}
"""What is recomputed, by the pattern of its name."""
INPUTS = re.compile(r"rope/\d+/x(_bf16)?|(rms|gelu|softcap|qlinear)/(x|scale|weight|scales)")


def _compare_sizes(path: Path, arrays: Arrays, recomputed: Recomputed) -> None:
    listed = read_json(path)
    for name, value in listed.items():
        if name == "ffn_size":
            ours = np.asarray([ffn_size(width, widening) for width, widening, _ in value], int)
            recomputed.compare(f"{path.name}: {name}", ours, np.asarray([size for *_, size in value], int), 0.0)
        elif name.startswith("sample_temperature_"):
            recompute_temperatures(f"{path.name}: {name}", float(name.rpartition("_")[2]), value, arrays, recomputed)
        else:
            reason = next((why for start, why in REASONS.items() if name.startswith(start)), None)
            recomputed.skipped[f"{path.name}: {name}"] = reason or "not a value that Linnet knows"


def recompute_order(path: Path, recomputed: Recomputed) -> None:
    """Compare names in file order, shapes, and the mesh axes over which the release shards each tensor."""
    listed = read_json(path)
    shapes = {str(row[1]): tuple(row[2]) for row in listed}
    cfg = _infer_config(path, shapes)
    specs, order = param_shapes(cfg), file_order(cfg)
    ours = [
        [number, name, list(specs[w.leaf][0 if layer is None else 1 :]), w.splits]
        for number, (name, w, layer) in enumerate(order)
    ]
    theirs = [[row[0], row[1], row[2], _parse_partition(str(row[4]), len(row[2]))] for row in listed]
    for part, at in (("numbers and names", slice(0, 2)), ("shapes", slice(2, 3)), ("partition", slice(3, 4))):
        wrong = [str(want) for mine, want in zip(ours, theirs, strict=False) if mine[at] != want[at]]
        n_wrong = len(wrong) + abs(len(ours) - len(theirs))
        note = f"{len(theirs)} tensors" if not n_wrong else (wrong or [f"{len(ours)} tensors, {len(theirs)} listed"])[0]
        recomputed.checks.append(Check(part, float(n_wrong), not n_wrong, note))
    recomputed.skipped["dtype"] = (
        "dtype of newly initialized weights in the reference, not of the files of the checkpoint"
    )


def _parse_partition(partition: str, rank: int) -> tuple[str | None, ...]:
    """Parse `PartitionSpec(None, 'data')`; trailing unsharded axes may be omitted."""
    axes = re.findall(r"\([^()]+\)|None|'\w+'", partition.removeprefix("PartitionSpec(").removesuffix(")"))
    names = [None if axis == "None" else "both" if axis.startswith("(") else axis.strip("'") for axis in axes]
    return tuple(names + [None] * (rank - len(names)))


def _infer_config(path: Path, shapes: dict[str, tuple[int, ...]]) -> MoEConfig:
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
