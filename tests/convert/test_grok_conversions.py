"""Grok-1 as safetensors: both Hugging Face naming schemes in, the first one out, floats and 8 bits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grok_files import CONFIG, draw, floats, write_release
from safetensors.numpy import load_file, save_file

from linnet.convert.grok.hf import export_conversion, read_conversion
from linnet.convert.grok.importer import find_grok
from linnet.convert.grok.leaves import to_leaves
from linnet.convert.grok.settings import find_settings, grok_config
from linnet.core import quant
from linnet.core.errors import UserError
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import param_specs
from linnet.runs.stored_array import read_safetensors
from linnet.runs.weights import read_weights, write_weights

CFG = dataclasses.replace(CONFIG, n_layer=2)
ATTENTION = {"query": "q", "key": "k", "value": "v", "linear": "o"}
NORMS = {"": "pre_attn", "_1": "post_attn", "_2": "pre_moe", "_3": "post_moe"}


def converted(cfg: MoEConfig, scheme: int, dtype: Any = np.float32, head: bool = False) -> dict[str, np.ndarray]:
    """As the conversions' authors write them, independent of the reader's tables."""
    tensors = {name: floats(value) for name, value in draw(cfg).items()}
    embed, norm = tensors["language_model/in_out_embed/embeddings"], tensors["language_model/rms_norm/scale"]
    if scheme == 1:
        found = {"transformer.in_out_embed.weight": embed, "transformer.rms_norm.weight": norm}
    else:
        found = {"model.embed_tokens.weight": embed, "model.norm.scale": norm}
    if head:
        found["lm_head.weight"] = embed
    for i in range(cfg.n_layer):
        get = lambda name, i=i: tensors[f"transformer/decoder_layer_{i}/{name}"]  # noqa: E731
        to = f"transformer.decoder_layer.{i}" if scheme == 1 else f"model.layers.{i}"
        for name, short in ATTENTION.items():
            where = f"multi_head_attention.{name}" if scheme == 1 else f"attn.{short}_proj"
            found[f"{to}.{where}.weight"] = get(f"multi_head_attention/{name}/w").T
        for number, name in NORMS.items():
            where = f"rms_norm{number}.weight" if scheme == 1 else f"{name}_norm.scale"
            found[f"{to}.{where}"] = get(f"rms_norm{number}/scale")
        found[f"{to}.{'router' if scheme == 1 else 'moe_block.gate'}.weight"] = get("router/w").T
        for e in range(cfg.n_expert):
            for name in ("linear", "linear_1", "linear_v"):
                where = f"moe.{e}.{name}" if scheme == 1 else f"moe_block.experts.{e}.{name}"
                found[f"{to}.{where}.weight"] = get(f"moe/{name}/w")[e].T
    return {name: np.ascontiguousarray(value.astype(dtype)) for name, value in found.items()}


def imported(path: Path, run: Path, cfg: MoEConfig, weights: Any = "float32") -> Any:
    found = find_grok(path, None) if find_settings(path) else None
    tensors = read_conversion(path, cfg) if found is None else found.tensors
    write_weights(run, to_leaves(tensors, cfg, weights), lambda _: None)
    return read_weights(run, param_specs(cfg))


def from_release(tmp_path: Path, cfg: MoEConfig) -> Any:
    write_release(tmp_path, cfg)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    return imported(tmp_path, tmp_path / "run", cfg)


def multiplied(tree: Any) -> Any:
    one = lambda x: quant.dequantize(x) if quant.is_quantized(x) else x  # noqa: E731
    return jax.tree.map(one, tree, is_leaf=quant.is_quantized)


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("scheme", [1, 2])
@pytest.mark.parametrize("form", ["file", "folder", "folder of several", "with head", "without suffix"])
def test_both_schemes_equal_the_release(tmp_path: Path, scheme: int, form: str) -> None:
    arrays = converted(CFG, scheme, head=form == "with head")
    if form == "without suffix":
        arrays = {name.removesuffix(".weight"): value for name, value in arrays.items()}
    folder = tmp_path / "hf"
    folder.mkdir()
    if form == "folder of several":
        names = sorted(arrays)
        parts = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
        for file, members in parts.items():
            save_file({name: arrays[name] for name in members}, folder / file)
        index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(arrays, folder / "model.safetensors")
    path = folder / "model.safetensors" if form == "file" else folder
    same(imported(path, tmp_path / "made", CFG), multiplied(from_release(tmp_path, CFG)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_floats_of_fewer_bits_lose_nothing(tmp_path: Path, dtype: Any) -> None:
    arrays = converted(CFG, 2, dtype)
    save_file(arrays, tmp_path / "model.safetensors")
    tree = imported(tmp_path, tmp_path / "run", CFG)
    kept = np.dtype(jnp.bfloat16) if dtype == jnp.bfloat16 else np.dtype("float32")
    assert tree.layers.w_q.dtype == tree.embed.dtype == kept
    assert tree.layers.router.dtype == tree.out_gain.dtype == np.float32  # never in fewer
    np.testing.assert_array_equal(tree.layers.w_q[1], arrays["model.layers.1.attn.q_proj.weight"].T)
    np.testing.assert_array_equal(
        tree.layers.experts.out[1, 2], arrays["model.layers.1.moe_block.experts.2.linear_1.weight"].T
    )


def test_float_model_is_quantized_while_it_is_imported(tmp_path: Path) -> None:
    """As `--weights int8` would at every start: bit for bit."""
    save_file(converted(CFG, 1), tmp_path / "model.safetensors")
    plain = imported(tmp_path, tmp_path / "float", CFG)
    made = imported(tmp_path, tmp_path / "int8", CFG, "int8")
    lowered = jax.jit(lambda tree: quant.cast_params(tree, param_specs(CFG), "int8"))(plain)
    assert quant.is_quantized(made.layers.experts.gate)
    same(made, lowered)
    halved = imported(tmp_path, tmp_path / "bfloat16", CFG, "bfloat16")
    same(halved, jax.jit(lambda tree: quant.cast_params(tree, param_specs(CFG), "bfloat16"))(plain))


@pytest.mark.parametrize("largest", [10**9, 20_000])
def test_exports_are_read_back_exactly(tmp_path: Path, largest: int) -> None:
    tree = from_release(tmp_path, CFG)
    n = export_conversion(tree, CFG, tmp_path / "out", largest)
    assert (n > 3) == (largest < 10**6)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == n
    arrays = {name: value for file in files for name, value in load_file(file).items()}  # by the library itself
    for name, value in converted(CFG, 1).items():
        np.testing.assert_array_equal(arrays.pop(name), value)
    assert not arrays
    assert find_settings(tmp_path / "out") == tmp_path / "out" / "config.json"
    again = grok_config(tmp_path / "out" / "config.json")
    assert dataclasses.replace(again, widening=CFG.widening, dtype=CFG.dtype, remat=CFG.remat) == CFG
    assert again.d_ffn == CFG.d_ffn
    same(imported(tmp_path / "out", tmp_path / "again", CFG), multiplied(tree))
    with pytest.raises(UserError, match="overwritten"):
        export_conversion(tree, CFG, tmp_path / "out")


def spoil(arrays: dict[str, np.ndarray], how: str) -> dict[str, np.ndarray]:
    name = "model.layers.1.attn.k_proj.weight"
    if how == "missing":
        del arrays[name]
    elif how == "extra":
        arrays["model.layers.2.attn.k_proj.weight"] = arrays[name]
    elif how == "not turned":
        arrays[name] = np.ascontiguousarray(arrays[name].T)
    elif how == "whole numbers":
        arrays[name] = arrays[name].astype(np.int8)
    elif how == "another head":
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"] + 1
    elif how == "another model":
        return {"wte.weight": arrays[name]}
    return arrays


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "no 'model.layers.1.attn.k_proj.weight'"),
        ("extra", "'model.layers.2.attn.k_proj.weight'"),
        ("not turned", "k_proj"),
        ("whole numbers", "int8"),
        ("another head", "lm_head"),
        ("another model", "wte"),
    ],
)
def test_incomplete_conversion_is_rejected_by_name(tmp_path: Path, how: str, words: str) -> None:
    save_file(spoil(converted(CFG, 2), how), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words):
        read_conversion(tmp_path, CFG)


def test_values_that_are_not_finite_are_rejected_by_name(tmp_path: Path) -> None:
    arrays = converted(CFG, 2)
    arrays["model.layers.1.attn.k_proj.weight"][0, 3] = np.nan
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="layers/w_k"):
        imported(tmp_path, tmp_path / "run", CFG)


def test_corrupt_safetensors_file_is_rejected(tmp_path: Path) -> None:
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "good")
    data = (tmp_path / "good").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for n in range(len(data)):
        (tmp_path / "bad").write_bytes(data[:n])
        with pytest.raises(UserError, match="complete safetensors"):
            read_safetensors(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(data + b"1")
    with pytest.raises(UserError, match="complete safetensors"):
        read_safetensors(tmp_path / "bad")
    for i in range(start):
        for bit in (0, 3, 6):
            spoiled = bytearray(data)
            spoiled[i] ^= 1 << bit
            (tmp_path / "bad").write_bytes(spoiled)
            try:
                arrays, _ = read_safetensors(tmp_path / "bad")
            except UserError:
                continue
            (array,) = arrays.values()  # only its name, or the shape's numbers with the same product
            assert array.nbytes == 24


@pytest.mark.parametrize(
    ("values", "field", "want"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 344}, "d_k", 16),
        (
            {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 344},
            "d_ffn",
            344,
        ),
        ({"hidden_size": 6144, "intermediate_size": 32768}, "d_ffn", 32768),
        ({"config": {"emb_size": 128}}, "d_model", 128),
        ({"model": {"d_model": 128}, "version": 1}, "d_model", 128),
        ({"eos_token_id": 5, "pad_token_id": None}, "end_id", 5),
    ],
)
def test_sizes_are_read_by_any_of_their_names(tmp_path: Path, values: Any, field: str, want: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert getattr(grok_config(tmp_path / "config.json"), field) == want


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"d_model": "x", "n_q_head": 4}', '{"emb_size": 8, "hidden_size": 9}', '{"emb_size": 0}']
)
def test_meaningless_settings_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        grok_config(tmp_path / "config.json")
