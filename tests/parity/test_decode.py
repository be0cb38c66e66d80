"""The fast decoding path against the reference: teacher-forced log-probabilities, final state, greedy tokens, nucleus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.models.generate import generate
from linnet.models.vq import convert, decode, slots
from linnet.models.vq.config import VQConfig
from linnet.nn.sampling import nucleus, sampling_settings

pytestmark = pytest.mark.optimized

GOLDENS = Path(__file__).parents[1] / "goldens" / "vq"


def load(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    path = GOLDENS / f"{name}.npz"
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    return arrays, json.loads(str(arrays["meta"]))["config"]


def model_of(arrays: dict[str, np.ndarray], config: dict[str, Any]) -> tuple[VQConfig, Any, Any]:
    fields = VQConfig.__dataclass_fields__
    known: dict[str, Any] = {k: bool(v) if fields[k].type == "bool" else v for k, v in config.items() if k in fields}
    cfg = VQConfig(**known)
    tree = {name.removeprefix("params/"): x for name, x in arrays.items() if name.startswith("params/")}
    return cfg, *convert.from_reference(tree, cfg)


def close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5 * max(float(np.abs(want).max()), 1e-30))


def test_teacher_forced() -> None:
    arrays, config = load("decode")
    cfg, params, buffers = model_of(arrays, config)
    prepared = slots.prepare(params, buffers, cfg)
    inputs = arrays["in/inputs"]
    state, logprobs = slots.init_slots(cfg, inputs.shape[0]), []
    for token in inputs.T:
        state, logits = decode.tick(prepared, state, jnp.asarray(token), cfg)
        logprobs.append(jax.nn.log_softmax(logits))
    close(np.stack(logprobs, axis=1), arrays["out/logprobs"])
    for row in range(inputs.shape[0]):
        carry = slots.extract(prepared, state, row, cfg)
        assert carry.position.tolist() == [inputs.shape[1]]
        for unit in range(cfg.n_unit):
            got = jax.tree.map(lambda x, unit=unit: np.asarray(x[unit, 0]), carry.attention)

            def want(name: str, unit: int = unit, row: int = row) -> np.ndarray:
                return arrays[f"out/state/{unit // 2}/{unit % 2}/{name}"][row]

            np.testing.assert_array_equal(got.codes, want("xlcache/z"))
            close(got.keys, want("xlcache/k_hat"))
            close(got.values, want("xlcache/v"))
            np.testing.assert_array_equal(got.count, want("aggcache/lower"))
            close(got.total / np.maximum(got.count, 1)[..., None], want("aggcache/upper_div_lower"))


def test_greedy_tokens() -> None:
    arrays, config = load("sample")
    cfg, params, buffers = model_of(arrays, config)
    want = arrays["out/greedy_tokens"]
    rows: list[list[int]] = [[] for _ in want]
    for step in generate(
        slots.DECODER,
        params,
        buffers,
        cfg,
        [[] for _ in want],
        max_tokens=want.shape[1],
        settings=sampling_settings(len(want), temperature=0.0),
        seeds=range(len(want)),
        ignore_end=True,
    ):
        for row, piece in zip(rows, step, strict=True):
            row += piece.tokens if piece else []
    np.testing.assert_array_equal(rows, want)


def test_nucleus() -> None:
    arrays, _ = load("nucleus")
    for source, prefix in (("in/logits", "out/out_p"), ("in/ties", "out/ties_out_p")):
        names = [name for name in arrays if name.startswith(prefix)]
        assert names
        for name in names:
            got = nucleus(jnp.asarray(arrays[source]), float(name.removeprefix(prefix)))
            np.testing.assert_array_equal(got, arrays[name], err_msg=name)
