"""Checkpoints in the layout of Grok-1's release, written by Python's own pickle: independent of the reader."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.models.moe.config import MoEConfig

GOLDENS = Path(__file__).parents[1] / "goldens" / "grok"
TINY_A = GOLDENS / "tiny_A"
CONFIG = MoEConfig(
    n_vocab=40, end_id=2, pad_id=0, d_model=16, d_k=4, n_q_head=4, n_kv_head=2, n_layer=11, n_expert=3, context=32
)
"""Eleven layers: as text, the eleventh comes third."""


class QuantizedWeight8bit:
    def __init__(self, weight: np.ndarray, scales: np.ndarray) -> None:
        self.weight, self.scales = weight, scales


QuantizedWeight8bit.__module__, QuantizedWeight8bit.__qualname__ = "__main__", "QuantizedWeight8bit"


@contextmanager
def as_main() -> Iterator[None]:
    """Pickle writes a class by the name it can be found under."""
    main: Any = sys.modules["__main__"]
    main.QuantizedWeight8bit = QuantizedWeight8bit
    try:
        yield
    finally:
        del main.QuantizedWeight8bit


def dump(value: Any, path: Path) -> None:
    with as_main():
        path.write_bytes(pickle.dumps(value, protocol=4))


def layer_shapes(cfg: MoEConfig) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Of one layer, by the release's names: shapes, and groups of scales where there are any."""
    d, f, e, q, k = cfg.d_model, cfg.d_ffn, cfg.n_expert, cfg.n_q_head * cfg.d_k, cfg.n_kv_head * cfg.d_k
    return {
        "moe/linear/w": ((e, d, f), 1),
        "moe/linear_1/w": ((e, f, d), 8),
        "moe/linear_v/w": ((e, d, f), 1),
        "multi_head_attention/key/w": ((d, k), 1),
        "multi_head_attention/linear/w": ((q, d), 8),
        "multi_head_attention/query/w": ((d, q), 1),
        "multi_head_attention/value/w": ((d, k), 1),
        "rms_norm/scale": ((d,), None),
        "rms_norm_1/scale": ((d,), None),
        "rms_norm_2/scale": ((d,), None),
        "rms_norm_3/scale": ((d,), None),
        "router/w": ((d, e), None),
    }


def names(cfg: MoEConfig) -> list[str]:
    layers = [f"transformer/decoder_layer_{i}/{name}" for i in range(cfg.n_layer) for name in layer_shapes(cfg)]
    return sorted(["language_model/in_out_embed/embeddings", "language_model/rms_norm/scale", *layers])


def draw(cfg: MoEConfig, seed: int = 0) -> dict[str, Any]:
    """Every tensor by its name: a float32 array, or a pair."""
    generator, found = np.random.default_rng(seed), {}
    for name in names(cfg):
        if name.startswith("language_model"):
            shape, groups = ((cfg.n_vocab, cfg.d_model) if "embed" in name else (cfg.d_model,)), None
        else:
            shape, groups = layer_shapes(cfg)[name.split("/", 2)[2]]
        if groups is None:
            found[name] = generator.normal(size=shape).astype(np.float32)
        else:
            weight = generator.integers(-127, 128, shape, np.int8)
            scales = generator.uniform(0.001, 0.02, (*shape[:-2], groups, shape[-1])).astype(jnp.bfloat16)
            found[name] = QuantizedWeight8bit(weight, scales)
    return found


def write_release(folder: Path, cfg: MoEConfig, seed: int = 0) -> dict[str, Any]:
    tensors = draw(cfg, seed)
    checkpoint = folder / "ckpt-0"
    checkpoint.mkdir(parents=True)
    for number, value in enumerate(tensors.values()):
        dump(value, checkpoint / f"tensor{number:05d}_000")
    return tensors


def number_of(tensors: dict[str, Any], name: str) -> int:
    return list(tensors).index(name)


def floats(value: Any) -> np.ndarray:
    """A pair multiplied out, the plain way: each row by the scales of its group."""
    if not isinstance(value, QuantizedWeight8bit):
        return value
    rows = value.weight.shape[-2] // value.scales.shape[-2]
    return value.weight.astype(np.float32) * np.repeat(value.scales.astype(np.float32), rows, axis=-2)
