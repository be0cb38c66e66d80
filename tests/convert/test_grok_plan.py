"""`linnet import --plan`: what it says beforehand is what is there afterwards."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from grok_files import CONFIG, TINY_A, QuantizedWeight8bit, dump, write_release
from safetensors.numpy import save_file
from test_grok_conversions import converted

from linnet.convert.grok import import_plan as plans
from linnet.convert.grok.import_plan import GB, MEMORIES, format_plan, plan_from_config
from linnet.convert.grok.importer import find_grok, plan_import
from linnet.convert.grok.leaves import to_leaves
from linnet.convert.grok.names import QUANTIZED
from linnet.convert.grok.settings import grok_config
from linnet.convert.grok.sizes import file_size, file_sizes
from linnet.core.pytree import n_bytes
from linnet.models.moe.params import param_specs
from linnet.runs import stored_array
from linnet.runs.weights import read_weights, write_weights

N_PARAM, N_BYTES = 315_684_820_992, 318_239_886_140
"""Of the released Grok-1: known from the release itself."""


def test_published_model_has_its_published_sizes() -> None:
    plan = plan_from_config(grok_config(None))
    assert plan.n_param == N_PARAM
    assert plan.checkpoint_bytes == N_BYTES
    assert grok_config(None).d_ffn == 32768
    assert plan.import_bytes < 3.3 * GB  # the embedding, in float32
    block = 128  # the cache is allocated in blocks; beside it are the tokens and the position
    assert plan.meshes[0].slot == 2 * 64 * (8192 + block) * 8 * 128 * 2 + 4 * (8192 + block) + 4
    words = format_plan(plan)
    for expected in ("315,684,820,992", "318,239,886,140", "8,192 tokens", "bfloat16"):
        assert expected in words
    for memory in MEMORIES:
        assert str(memory) in words


def test_golden_file_sizes_are_estimated() -> None:
    real = [path.stat().st_size for path in sorted((TINY_A / "ckpt-0").iterdir())]
    assert file_sizes(grok_config(TINY_A / "config.json"), dict.fromkeys(QUANTIZED, 1)) == real


@pytest.mark.parametrize("n", [1, 63, 64, 4_080, 4_090, 8_100, 8_190, 8_192, 16_300, 16_383, 16_384, 16_400, 70_000])
def test_pickle_size_is_estimated_at_frame_boundaries(tmp_path: Path, n: int) -> None:
    """This numpy's own module has one letter more than the release's."""
    dump(np.zeros(n, np.float32), tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == file_size((n,), None) + 1
    for rows in (8, 2048):
        value = QuantizedWeight8bit(np.zeros((rows, n), np.int8), np.zeros((8, n), jnp.bfloat16))
        dump(value, tmp_path / "file")
        assert (tmp_path / "file").stat().st_size == file_size((rows, n), 8) + 1


def test_plan_of_a_checkpoint_is_what_the_import_makes(tmp_path: Path) -> None:
    plan = plan_import(TINY_A, None, "float32")
    found = find_grok(TINY_A, None)
    leaves = to_leaves(found.tensors, found.cfg, "float32")
    write_weights(tmp_path, leaves, lambda _: None)
    assert plan.checkpoint_bytes == sum(path.stat().st_size for path in (TINY_A / "ckpt-0").iterdir())
    tree = read_weights(tmp_path, param_specs(found.cfg))
    assert plan.run_bytes == n_bytes(tree)
    assert plan.meshes[0].weights["int8"] == n_bytes(read_weights(tmp_path, param_specs(found.cfg), "int8"))


@pytest.mark.parametrize("held", ["float32", "bfloat16", "int8"])
def test_bytes_of_every_weight_dtype_are_estimated(tmp_path: Path, held: str) -> None:
    cfg = dataclasses.replace(CONFIG, n_layer=1)
    save_file(converted(cfg, 1), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    found = find_grok(tmp_path, None)
    plan = plan_import(tmp_path, None, "float32")
    write_weights(tmp_path / "run", to_leaves(found.tensors, cfg, "float32"), lambda _: None)
    tree = read_weights(tmp_path / "run", param_specs(cfg), held)  # pyright: ignore[reportArgumentType]
    assert plan.meshes[0].weights[held] == n_bytes(tree)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("turned", [False, True])
def test_importing_uses_no_more_memory_than_planned(
    tmp_path: Path, turned: bool, weights: str, monkeypatch: Any
) -> None:
    """What numpy holds: XLA's own memory while it quantises is not seen here."""
    for module in (stored_array, plans):
        monkeypatch.setattr(module, "CHUNK", 1 << 18)
    cfg = dataclasses.replace(CONFIG, n_layer=1, n_expert=2, d_model=256, d_k=32, n_vocab=64, widening=48.0)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
    if turned:
        save_file(converted(cfg, 2), tmp_path / "model.safetensors")
    else:
        write_release(tmp_path, cfg)
    plan = plan_import(tmp_path, None, weights)  # pyright: ignore[reportArgumentType]
    found = find_grok(tmp_path, None)
    leaves = to_leaves(found.tensors, cfg, weights)  # pyright: ignore[reportArgumentType]
    tracemalloc.start()
    try:
        write_weights(tmp_path / "run", leaves, lambda _: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < plan.import_bytes + (1 << 19), (peak, plan.import_bytes)


def test_more_devices_need_less_memory_each_down_to_their_shard() -> None:
    plan = plan_from_config(grok_config(None))
    shares = [mesh.total("int8") for mesh in plan.meshes]
    assert shares == sorted(shares, reverse=True)
    for mesh in plan.meshes:
        assert math.prod(mesh.sizes.values()) == mesh.n_device
        assert mesh.weights["int8"] * mesh.n_device >= plan.meshes[0].weights["int8"]
    eight = next(mesh for mesh in plan.meshes if mesh.n_device == 8)
    assert eight.fits("int8", 80 * GB)
    assert not eight.fits("int8", 32 * GB)
    assert not eight.fits("bfloat16", 80 * GB)
    one = plan.meshes[0]
    assert not any(one.fits("int8", memory * GB) for memory in MEMORIES)


def test_published_settings_are_those_of_the_release() -> None:
    cfg = grok_config(None)
    assert (cfg.n_vocab, cfg.d_model, cfg.widening, cfg.d_k) == (131072, 6144, 8.0, 128)
    assert (cfg.n_q_head, cfg.n_kv_head, cfg.n_layer, cfg.n_expert, cfg.n_choice) == (48, 8, 64, 8, 2)
    assert (cfg.context, cfg.pad_id, cfg.end_id, cfg.score_cap, cfg.rope_base) == (8192, 0, 2, 30.0, 10_000.0)
    assert (cfg.embed_scale, cfg.logit_scale) == (78.38367176906169, 0.5773502691896257)
    assert (cfg.score_scale, cfg.dtype) == (0.08838834764831845, "bfloat16")
