"""Weights in and out: the official checkpoint (npz and Flax msgpack) and safetensors; damaged files are rejected by name."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.config.codec import to_json
from linnet.config.schema import RunConfig
from linnet.convert import (
    export_safetensors,
    import_config,
    import_safetensors,
    read_transformer_vq,
    to_model,
)
from linnet.convert.flax import read_flax
from linnet.core.errors import UserError
from linnet.core.params import map_specs
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import to_reference
from linnet.models.vq.params import buffer_specs, param_specs

PLAIN = VQConfig(n_vocab=11, d_model=8, d_k=4, d_v=6, n_head=2, n_code=5, n_layer=2, block_len=4, mem_len=6)
TIED = VQConfig(
    n_vocab=11,
    d_model=8,
    d_k=4,
    d_v=6,
    n_code=5,
    n_layer=1,
    block_len=4,
    mem_len=6,
    pe_abs=True,
    e_tie=True,
    e_preln=True,
)


def weights(cfg: VQConfig) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    draw = lambda spec: jnp.asarray(generator.normal(size=spec.shape), jnp.float32)  # noqa: E731
    return map_specs(draw, param_specs(cfg)), map_specs(draw, buffer_specs(cfg))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# Flax's format, written down independently of the reader.


def pack_array(array: np.ndarray, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True))


def pack_tree(tree: Any, chunk: int | None = None) -> bytes:
    def pack(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: pack(value) for name, value in node.items()}
        if isinstance(node, np.ndarray) and chunk and node.size > chunk:
            flat = node.reshape(-1)
            pieces = [flat[i : i + chunk] for i in range(0, flat.size, chunk)]
            return {
                "__msgpack_chunked_array__": True,
                "shape": {str(i): n for i, n in enumerate(node.shape)},
                "chunks": {str(i): pack_array(piece) for i, piece in enumerate(pieces)},
            }
        if isinstance(node, np.ndarray):
            return pack_array(node)
        if isinstance(node, np.generic):
            return pack_array(np.asarray(node), 3)
        if isinstance(node, complex):
            return msgpack.ExtType(2, msgpack.packb((node.real, node.imag)))
        return node

    return cast(bytes, msgpack.packb(pack(tree), use_bin_type=True))


def nest(flat: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


def official(cfg: VQConfig) -> dict[str, Any]:
    return to_reference(*weights(cfg), cfg)


def train_state(cfg: VQConfig) -> dict[str, Any]:
    """As saved by the reference's trainer: moments of the optimiser have the same names as the weights."""
    params = nest(official(cfg))
    moments = nest({name: value * 7 for name, value in official(cfg).items()})
    return {
        "step": np.int64(3),
        "params": params,
        "opt_state": {"0": {}, "1": {"mu": moments, "nu": moments, "count": np.int32(3)}, "2": None},
        "odd": 1j,
    }


@pytest.mark.parametrize("cfg", [PLAIN, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("form", ["npz", "npz_params", "golden", "state_npz", "msgpack", "chunked", "bare_msgpack"])
def test_official_checkpoint(tmp_path: Path, cfg: VQConfig, form: str) -> None:
    path, flat = tmp_path / "file", official(cfg)
    meta = np.array(json.dumps({"config": {"mem_len": 6, "block_len": 4, "note": "n", "e_scale": 1.0}}))
    inputs: dict[str, Any] = {"in/x": np.zeros(1)}
    moments: dict[str, Any] = {"opt_state/0": np.zeros(1)}
    with open(path, "wb") as file:
        if form == "npz":
            np.savez(file, **flat)
        elif form == "npz_params":
            np.savez_compressed(file, **{f"params/{k}": v for k, v in flat.items()}, meta=meta)
        elif form == "golden":
            np.savez(file, **{f"params/{k}": v for k, v in flat.items()}, meta=meta, **inputs)
        elif form == "state_npz":
            np.savez(file, **{f"params/{k}": v for k, v in flat.items()}, **moments, step=3)
        else:
            tree = nest(flat) if form == "bare_msgpack" else train_state(cfg)
            file.write(pack_tree(tree, chunk=7 if form == "chunked" else None))
    tree, settings = read_transformer_vq(path)
    overrides = {} if settings else {"block_len": 4, "mem_len": 6}
    made = import_config(tree, settings, overrides=overrides)
    assert made == cfg
    same(to_model(tree, made), weights(cfg))


def test_settings_come_from_the_file_then_the_user(tmp_path: Path) -> None:
    tree = official(PLAIN)
    with pytest.raises(UserError, match="--block-len N --mem-len N"):
        import_config(tree, {})
    assert import_config(tree, {}, defaults={"block_len": 512, "mem_len": 512}).mem_len == 512
    file = {"block_len": 4, "mem_len": 6, "e_scale": 0.5}
    assert import_config(tree, file, defaults={"mem_len": 512}).mem_len == 6
    assert import_config(tree, file, overrides={"mem_len": 8}).mem_len == 8
    assert import_config(tree, file).e_scale == 0.5
    with pytest.raises(UserError, match="d_new"):
        import_config(tree, {**file, "d_new": 1})
    with pytest.raises(UserError, match="shape"):
        to_model(tree, import_config(tree, file, overrides={"n_vocab": 12}))


def test_weights_may_be_bfloat16_but_must_be_finite(tmp_path: Path) -> None:
    flat = {name: np.asarray(jnp.asarray(value, jnp.bfloat16)) for name, value in official(PLAIN).items()}
    path = tmp_path / "file"
    path.write_bytes(pack_tree({"params": nest(flat)}))
    tree, _ = read_transformer_vq(path)
    params, _ = to_model(tree, PLAIN)
    np.testing.assert_array_equal(params.embed, np.asarray(flat["token_embedder/embs"], np.float32))
    spoiled = {**official(PLAIN), "out_proj/bias": np.full(11, np.nan, np.float32)}
    with pytest.raises(UserError, match="out_proj/bias"):
        to_model(spoiled, PLAIN)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut=st.floats(0, 0.999), flip=st.booleans(), bit=st.integers(0, 7))
def test_corrupt_msgpack_is_rejected_or_read_completely(tmp_path: Path, cut: float, flip: bool, bit: int) -> None:
    """Whatever happens to the bytes, nothing but a UserError comes out, and never a wrong shape."""
    data = bytearray(pack_tree({"params": {"a": np.arange(6.0).reshape(2, 3), "b": {"c": np.int32(4)}}}, chunk=4))
    at = int(cut * len(data))
    if flip:
        data[at] ^= 1 << bit
    else:
        del data[at:]
    path = tmp_path / "file"
    path.write_bytes(bytes(data))
    if not flip:
        with pytest.raises(UserError, match="file"):
            read_flax(path)
        return
    with contextlib.suppress(UserError):
        assert isinstance(read_flax(path), dict)


def chunked(**changes: Any) -> bytes:
    node = {"__msgpack_chunked_array__": True, "shape": {"0": 4}, "chunks": {"0": pack_array(np.zeros(4, np.float32))}}
    return cast(bytes, msgpack.packb({"a": {**node, **changes}}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        msgpack.packb([1, 2]),
        msgpack.packb({"a": msgpack.ExtType(9, b"")}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((10**12,), "float32", b"1234")))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((1,), "object", b"12345678")))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((-1, -1), "float32", b"1234")))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((["x"], "float32", b"1234")))}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(((1,), ["float32"], b"1234")))}),
        chunked(shape={"0": 10**12}),
        chunked(shape={"0": -4}),
        chunked(chunks={"1": pack_array(np.zeros(4, np.float32))}),
        chunked(chunks={}),
        chunked(chunks={"0": 5}),
        chunked(shape=[4]),
        b"\x81\xa1a" * 3000,
    ],
)
def test_foreign_msgpack_is_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(UserError, match="file"):
        read_transformer_vq(tmp_path / "file")


def test_foreign_npz_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    foreign: list[dict[str, Any]] = [{"a": np.zeros(2)}, {}, {"params/a": np.zeros(2)}]
    for arrays in foreign:
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=r"file\.npz"):
            read_transformer_vq(path)
    np.savez(path, **official(PLAIN), meta=np.array("{"))
    with pytest.raises(UserError, match="meta"):
        read_transformer_vq(path)
    np.savez(path, allow_pickle=True, **{"token_embedder/embs": np.array([{}])})
    with pytest.raises(UserError, match="pickled"):
        read_transformer_vq(path)
    with pytest.raises(UserError, match="does not exist"):
        read_transformer_vq(tmp_path / "none")
    with pytest.raises(UserError, match="folder"):
        read_transformer_vq(tmp_path)
    part = {name: value for name, value in official(PLAIN).items() if "layers_0" not in name}
    np.savez(path, **part)
    with pytest.raises(UserError, match="gap"):
        import_config(*read_transformer_vq(path))


def run_config(cfg: VQConfig) -> dict[str, Any]:
    return to_json(RunConfig(model=cfg))


@pytest.mark.parametrize("cfg", [PLAIN, TIED], ids=["plain", "tied"])
def test_safetensors_round_trip(tmp_path: Path, cfg: VQConfig) -> None:
    params, buffers = weights(cfg)
    path = tmp_path / "deep" / "model.safetensors"
    mark = export_safetensors(params, buffers, run_config(cfg), path)
    again = import_safetensors(path)
    same(again[0], params)
    same(again[1], buffers)
    assert again[2] == json.loads(json.dumps(run_config(cfg)))
    assert os.listdir(path.parent) == ["model.safetensors"]
    assert export_safetensors(params, buffers, run_config(cfg), tmp_path / "b") == mark
    moved = jax.tree.map(lambda x: x + 1, params)
    assert export_safetensors(moved, buffers, run_config(cfg), tmp_path / "c") != mark


def test_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, buffers = weights(PLAIN)
    path = tmp_path / "model.safetensors"
    export_safetensors(params, buffers, run_config(PLAIN), path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="model.safetensors cannot be written .No space"):
        export_safetensors(params, buffers, run_config(PLAIN), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_wrong_safetensors_are_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    params, buffers = weights(PLAIN)
    path = tmp_path / "model.safetensors"
    export_safetensors(params, buffers, run_config(PLAIN), path)
    complete = path.read_bytes()
    for data in (b"", b"junk" * 100, complete[:-10], complete[:50]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"model\.safetensors"):
            import_safetensors(path)
    flipped = bytearray(complete)
    flipped[-5] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(UserError, match="fingerprint"):
        import_safetensors(path)
    save_file({"a": np.zeros(2)}, path)
    with pytest.raises(UserError, match="not written by Linnet"):
        import_safetensors(path)
    export_safetensors(params, buffers, {**run_config(PLAIN), "version": 99}, path)
    with pytest.raises(UserError, match="version"):
        import_safetensors(path)
    export_safetensors(params, buffers, run_config(TIED), path)
    with pytest.raises(UserError, match="disagree"):
        import_safetensors(path)
    with pytest.raises(UserError, match="does not exist"):
        import_safetensors(tmp_path / "none")
