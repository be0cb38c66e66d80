"""The released checkpoint's layout: which file is which tensor, shards, and all that can be wrong with a folder of files."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from grok_files import CONFIG, GOLDENS, TINY_A, QuantizedWeight8bit, draw, dump, floats, number_of, write_release

from linnet.convert.grok.checkpoint import find_folder, read_checkpoint, shard_slices
from linnet.convert.grok.leaves import Tensor, TensorPair, to_leaves
from linnet.convert.grok.names import BY_LEAF, WEIGHTS, file_order
from linnet.convert.grok.settings import grok_config
from linnet.core.errors import UserError
from linnet.models.moe.config import MoEConfig
from linnet.runs import stored_array
from linnet.runs.stored_array import write_safetensors

# The release's names of a layer's weights, and ours: from the family's own description.
LEAVES = {
    "moe/linear/w": "layers/experts/gate",
    "moe/linear_1/w": "layers/experts/out",
    "moe/linear_v/w": "layers/experts/value",
    "multi_head_attention/key/w": "layers/w_k",
    "multi_head_attention/linear/w": "layers/w_o",
    "multi_head_attention/query/w": "layers/w_q",
    "multi_head_attention/value/w": "layers/w_v",
    "rms_norm/scale": "layers/attention_in_gain",
    "rms_norm_1/scale": "layers/attention_out_gain",
    "rms_norm_2/scale": "layers/experts_in_gain",
    "rms_norm_3/scale": "layers/experts_out_gain",
    "router/w": "layers/router",
}


def multiplied(tensor: Tensor | TensorPair) -> np.ndarray:
    if isinstance(tensor, Tensor):
        return tensor.read()
    return floats(QuantizedWeight8bit(tensor.weight.read(), tensor.scales.read()))


def check(found: Any, tensors: dict[str, Any], cfg: MoEConfig) -> None:
    np.testing.assert_array_equal(multiplied(found["embed"][0]), tensors["language_model/in_out_embed/embeddings"])
    np.testing.assert_array_equal(multiplied(found["out_gain"][0]), tensors["language_model/rms_norm/scale"])
    for name, leaf in LEAVES.items():
        assert len(found[leaf]) == cfg.n_layer
        for i in range(cfg.n_layer):
            want = floats(tensors[f"transformer/decoder_layer_{i}/{name}"])
            np.testing.assert_array_equal(multiplied(found[leaf][i]), want)


def test_published_order_shapes_and_partition_are_ours() -> None:
    cfg, order = grok_config(None), json.loads((GOLDENS / "real_param_order.json").read_text())
    specs = to_shapes(cfg)
    ours = file_order(cfg)
    assert [row[1] for row in order] == [name for name, _, _ in ours]
    for (_, name, shape, _, partition), (_, weight, layer) in zip(order, ours, strict=True):
        assert tuple(shape) == specs[weight.leaf][0 if layer is None else 1 :], name
        splits = eval(partition, {"PartitionSpec": lambda *axes: axes})  # a golden, of our own
        splits = tuple("both" if isinstance(axis, tuple) else axis for axis in splits)
        assert (*splits, None)[: len(shape)] == weight.splits, name


def to_shapes(cfg: MoEConfig) -> dict[str, tuple[int, ...]]:
    from linnet.convert.grok.leaves import specs_by_name

    return {name: spec.shape for name, spec in specs_by_name(cfg).items()}


def test_every_leaf_of_the_family_has_one_name() -> None:
    assert set(to_shapes(CONFIG)) == set(BY_LEAF)
    assert len(BY_LEAF) == len(WEIGHTS)


def test_tiny_a_is_read_whole() -> None:
    """Against the goldens' own list of files, with its types."""
    cfg = grok_config(TINY_A / "config.json")
    found = read_checkpoint(TINY_A / "ckpt-0", cfg)
    index = json.loads((TINY_A / "index.json").read_text())
    assert len(index) == sum(len(tensors) for tensors in found.values())
    for _, name, kind, shape, dtype, scales, scales_dtype in index:
        parts = name.removeprefix("params/").split("/")
        if parts[0] == "language_model":
            tensor = found["embed" if "embed" in name else "out_gain"][0]
        else:
            tensor = found[LEAVES["/".join(parts[2:])]][int(parts[1].removeprefix("decoder_layer_"))]
        if kind == "raw":
            assert isinstance(tensor, Tensor)
            assert (list(tensor.shape), str(tensor.dtype)) == (shape, dtype)
        else:
            assert isinstance(tensor, TensorPair)
            assert (list(tensor.weight.shape), str(tensor.weight.dtype)) == (shape, dtype)
            assert (list(tensor.scales.shape), str(tensor.scales.dtype)) == (scales, scales_dtype)


def test_eleven_layers_come_back_in_their_order(tmp_path: Path) -> None:
    tensors = write_release(tmp_path, CONFIG)
    folder = find_folder(tmp_path)
    assert folder is not None
    assert folder == tmp_path / "ckpt-0"
    assert find_folder(folder) == folder
    check(read_checkpoint(folder, CONFIG), tensors, CONFIG)


# Shards.


def cut(value: Any, axis: int, at: list[int]) -> list[Any]:
    """A tensor in parts; a pair's scales go with the rows or columns that they are for."""
    if not isinstance(value, QuantizedWeight8bit):
        return np.split(value, at, axis)
    n, groups = value.weight.shape[axis], value.scales.shape[axis]
    own = [i * groups // n for i in at] if axis == value.weight.ndim - 2 else at
    weights = np.split(value.weight, at, axis)
    if axis == value.weight.ndim - 2 and groups == 1:
        return [QuantizedWeight8bit(w, value.scales) for w in weights]
    return [QuantizedWeight8bit(w, s) for w, s in zip(weights, np.split(value.scales, own, axis), strict=True)]


def reshard(folder: Path, tensors: dict[str, Any], name: str, parts: list[Any]) -> None:
    number = number_of(tensors, name)
    for shard, part in enumerate(parts):
        dump(part, folder / f"tensor{number:05d}_{shard:03d}")


SMALL = dataclasses.replace(CONFIG, n_layer=1)
LAYER = "transformer/decoder_layer_0/"


@pytest.mark.parametrize(
    ("name", "axis", "at"),
    [
        ("moe/linear/w", 0, [1]),
        ("moe/linear/w", 0, [1, 2]),
        ("moe/linear/w", 1, [8]),
        ("moe/linear/w", 2, [40, 80]),
        ("moe/linear_1/w", 1, [44]),
        ("moe/linear_1/w", 2, [4, 8, 12]),
        ("multi_head_attention/linear/w", 0, [2, 4, 6, 8, 10, 12, 14]),
        ("multi_head_attention/linear/w", 0, [4, 6]),
        ("multi_head_attention/linear/w", 1, [5]),
        ("multi_head_attention/query/w", 1, [1, 2]),
        ("multi_head_attention/query/w", 0, [4, 8, 12]),
        ("router/w", 0, [8]),
        ("rms_norm_2/scale", 0, [3]),
    ],
)
def test_shards_along_any_one_axis_are_joined(tmp_path: Path, name: str, axis: int, at: list[int]) -> None:
    tensors = write_release(tmp_path, SMALL)
    folder = tmp_path / "ckpt-0"
    reshard(folder, tensors, LAYER + name, cut(tensors[LAYER + name], axis, at))
    check(read_checkpoint(folder, SMALL), tensors, SMALL)


@pytest.mark.parametrize(("n_data", "n_model"), [(1, 2), (2, 1), (2, 2), (1, 8), (4, 2)])
def test_checkpoint_of_several_hosts_is_joined_by_shard(tmp_path: Path, n_data: int, n_model: int) -> None:
    """Each tensor cut as the release partitions it; hosts are numbered data first. What is not divided is in every shard."""
    cfg = dataclasses.replace(SMALL, n_q_head=8, n_kv_head=8)
    tensors = draw(cfg)
    folder = tmp_path / "ckpt-0"
    folder.mkdir()
    for name, weight, _ in file_order(cfg):
        value = tensors[name.removeprefix("params/")]
        parts = []
        for d in range(n_data):
            for m in range(n_model):
                part = value
                for axis, split in enumerate(weight.splits):
                    n, i = {
                        "data": (n_data, d),
                        "model": (n_model, m),
                        "both": (n_data * n_model, d * n_model + m),
                    }.get(split or "", (1, 0))
                    shape = part.weight.shape if isinstance(part, QuantizedWeight8bit) else part.shape
                    size = shape[axis] // n
                    part = cut(part, axis, [i * size, (i + 1) * size])[1] if n > 1 else part
                parts.append(part)
        reshard(folder, tensors, name.removeprefix("params/"), parts)
    check(read_checkpoint(folder, cfg), tensors, cfg)


def test_copies_that_differ_are_rejected(tmp_path: Path) -> None:
    tensors = write_release(tmp_path, SMALL)
    name = LAYER + "rms_norm/scale"
    reshard(tmp_path / "ckpt-0", tensors, name, [tensors[name], tensors[name] + 1])
    found = read_checkpoint(tmp_path / "ckpt-0", SMALL)
    with pytest.raises(UserError, match="copy"):
        multiplied(found[LEAVES["rms_norm/scale"]][0])


def test_scales_that_could_be_of_any_rows_are_rejected(tmp_path: Path) -> None:
    """Each shard of the rows with all 8 groups: of its own rows, or copies of the whole's?"""
    tensors = write_release(tmp_path, SMALL)
    name = LAYER + "multi_head_attention/linear/w"
    value = tensors[name]
    parts = [QuantizedWeight8bit(w, value.scales) for w in np.split(value.weight, 2)]
    reshard(tmp_path / "ckpt-0", tensors, name, parts)
    with pytest.raises(UserError, match="equal in every shard"):
        read_checkpoint(tmp_path / "ckpt-0", SMALL)


@pytest.mark.parametrize(
    ("shape", "shards"),
    [
        ((8, 8), [(8, 4)]),
        ((8, 8), [(4, 8)] * 3),
        ((8, 8), [(4, 4)] * 3),
        ((8, 8), [(2, 4)] * 4),
        ((8, 8), [(4, 4), (4, 4), (4, 4), (4, 8)]),
        ((8, 8), [(64,)]),
        ((8, 8), [(3, 8)] * 2),
        ((8, 8), [(8, 16)]),
        ((8, 8), [(16, 8)]),
    ],
)
def test_incomplete_shards_are_rejected(shape: tuple[int, ...], shards: list[tuple[int, ...]]) -> None:
    with pytest.raises(UserError, match=r"tensor00007.*sizes need \(8, 8\)"):
        shard_slices("tensor00007_000", shape, shards, ("data", "model"))


# What can be wrong with a folder.


def spoil_missing(folder: Path, tensors: dict[str, Any]) -> str:
    (folder / "tensor00003_000").unlink()
    return "has no tensor00003_000 \\(1 missing\\)"


def spoil_extra(folder: Path, tensors: dict[str, Any]) -> str:
    shutil.copy(folder / "tensor00003_000", folder / "tensor00014_000")
    return "has tensor00014_000 \\(1 extra\\)"


def spoil_shard_missing(folder: Path, tensors: dict[str, Any]) -> str:
    (folder / "tensor00003_000").rename(folder / "tensor00003_001")
    return "no tensor00003_000"


def spoil_stranger(folder: Path, tensors: dict[str, Any]) -> str:
    (folder / "tensor3_000").write_bytes(b"")
    return "tensor3_000 is not part"


def spoil_swapped(folder: Path, tensors: dict[str, Any]) -> str:
    """Files of other numbers have other shapes."""
    (folder / "tensor00002_000").rename(folder / "x")
    (folder / "tensor00003_000").rename(folder / "tensor00002_000")
    (folder / "x").rename(folder / "tensor00003_000")
    return "tensor00002_000 .*moe/linear/w"


def spoil_type(folder: Path, tensors: dict[str, Any]) -> str:
    dump(tensors["language_model/in_out_embed/embeddings"].astype(np.int8), folder / "tensor00000_000")
    return "tensor00000_000 .*int8"


def spoil_pair(folder: Path, tensors: dict[str, Any]) -> str:
    """A norm is never in 8 bits."""
    norm = QuantizedWeight8bit(np.zeros((1, 16), np.int8), np.ones((1, 16), jnp.bfloat16))
    dump(norm, folder / f"tensor{number_of(tensors, LAYER + 'rms_norm/scale'):05d}_000")
    return "8-bit pair"


def spoil_scales(folder: Path, tensors: dict[str, Any]) -> str:
    value = tensors[LAYER + "moe/linear/w"]
    dump(QuantizedWeight8bit(value.weight, value.scales[..., :-1]), folder / "tensor00002_000")
    return "scales' shape in tensor00002_000"


def spoil_groups(folder: Path, tensors: dict[str, Any]) -> str:
    value = tensors[LAYER + "moe/linear/w"]
    dump(QuantizedWeight8bit(value.weight, np.repeat(value.scales, 3, axis=-2)), folder / "tensor00002_000")
    return "scales' shape in tensor00002_000"


def spoil_cut(folder: Path, tensors: dict[str, Any]) -> str:
    path = folder / "tensor00005_000"
    path.write_bytes(path.read_bytes()[:-20])
    return "tensor00005_000 is not a tensor"


SPOILERS = [
    spoil_missing,
    spoil_extra,
    spoil_shard_missing,
    spoil_stranger,
    spoil_swapped,
    spoil_type,
    spoil_pair,
    spoil_scales,
    spoil_groups,
    spoil_cut,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_folder_that_is_incomplete_is_rejected_by_name(tmp_path: Path, spoil: Any) -> None:
    tensors = write_release(tmp_path, SMALL)
    words = spoil(tmp_path / "ckpt-0", tensors)
    with pytest.raises(UserError, match=words):
        read_checkpoint(tmp_path / "ckpt-0", SMALL)


def test_other_sizes_are_rejected(tmp_path: Path) -> None:
    write_release(tmp_path, SMALL)
    for change in ({"n_layer": 2}, {"d_model": 32}, {"n_kv_head": 4}, {"n_vocab": 41}, {"n_expert": 4}):
        with pytest.raises(UserError, match=r"sizes|settings"):
            read_checkpoint(tmp_path / "ckpt-0", dataclasses.replace(SMALL, **change))


def test_differing_layers_are_rejected(tmp_path: Path) -> None:
    cfg = dataclasses.replace(CONFIG, n_layer=2)
    tensors = write_release(tmp_path, cfg)
    name = "transformer/decoder_layer_1/multi_head_attention/query/w"
    path = tmp_path / "ckpt-0" / f"tensor{number_of(tensors, name):05d}_000"
    dump(floats(tensors[name]), path)
    with pytest.raises(UserError, match="have the same format"):
        to_leaves(read_checkpoint(tmp_path / "ckpt-0", cfg), cfg, "float32")
    dump(QuantizedWeight8bit(tensors[name].weight, np.repeat(tensors[name].scales, 2, axis=-2)), path)
    with pytest.raises(UserError, match="have the same format"):
        to_leaves(read_checkpoint(tmp_path / "ckpt-0", cfg), cfg, "float32")


def test_importing_keeps_one_copy_of_one_tensor(tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint of many times the largest tensor: at no moment is more than that tensor and a chunk held."""
    monkeypatch.setattr(stored_array, "CHUNK", 1 << 18)
    cfg = dataclasses.replace(CONFIG, n_layer=3, n_expert=4, d_model=256, d_k=32, n_vocab=64, widening=24.0)
    tensors = write_release(tmp_path / "one", cfg)
    for number, value in enumerate(tensors.values()):
        if isinstance(value, QuantizedWeight8bit) and value.weight.ndim == 3:
            reshard(
                tmp_path / "one" / "ckpt-0", tensors, list(tensors)[number], cut(value, 2, [value.weight.shape[2] // 2])
            )
    largest = max(v.weight.nbytes for v in tensors.values() if isinstance(v, QuantizedWeight8bit))
    total = sum(v.weight.nbytes for v in tensors.values() if isinstance(v, QuantizedWeight8bit))
    del tensors
    assert total > 8 * largest
    leaves = to_leaves(read_checkpoint(tmp_path / "one" / "ckpt-0", cfg), cfg, "float32")
    tracemalloc.start()
    try:
        for i, leaf in enumerate(leaves):
            write_safetensors(tmp_path / str(i), [leaf], {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest > 4_000_000
    assert peak < 1.2 * largest, (peak, largest)
