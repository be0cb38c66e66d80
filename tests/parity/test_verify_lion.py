"""`linnet verify` on a train file of lion: signs in doubt are counted apart, and nothing else passes because of them.

The files are written by a slow lion in numpy, which stores its momentum in bfloat16 as the reference does and takes gradients with
noise of the size that another device's would have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.config.schema import OptimConfig
from linnet.core.params import map_specs
from linnet.core.pytree import named_leaves
from linnet.data.batch import Batch
from linnet.models.vq import family
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import leaves_from_reference, params_from_leaves, to_reference
from linnet.optim.optimizer import schedule
from linnet.verify import Verification, verify_file
from linnet.verify.vq import lion

CFG = VQConfig(
    n_vocab=40, d_model=32, d_k=8, d_v=32, n_code=8, n_layer=1, block_len=8, mem_len=8, c_beta=0.1, c_gamma=0.9
)
ROWS, LENGTH, UPDATE = 2, 32, 16
OPT = {"optimizer": "lion", "lr_max": 1e-3, "lr_schedule": "cosine", "wd_lam": 2e-4, "grad_clip": 0.1}
OPT |= {"n_warmup_step": 2, "n_max_step": 10}
B1, B2 = 0.95, 0.98
Leaves = dict[str, np.ndarray]
Change = Callable[[int, Leaves, Leaves], None]
"""May change, at an update: the signs, given the interpolated momenta."""


def nothing(update: int, mixed: Leaves, signs: Leaves) -> None:
    del update, mixed, signs


@jax.jit
def gradient(params: Any, buffers: Any, carry: Any, batch: Batch) -> Any:
    (_, aux), found = jax.value_and_grad(lambda p: family.loss(p, buffers, carry, batch, None, 0, CFG), has_aux=True)(
        params
    )
    return found, aux.carry, family.update_buffers(buffers, aux.statistics, CFG)


def lion_file(path: Path, change: Change = nothing, *, b1: float = B1, decay_all: bool | None = None) -> Path:
    generator = np.random.default_rng(0)
    draw = lambda spec: jnp.asarray(generator.normal(size=spec.shape) / spec.shape[-1] ** 0.5, jnp.float32)  # noqa: E731
    params, buffers = (map_specs(draw, specs(CFG)) for specs in (family.param_specs, family.buffer_specs))
    buffers = dataclasses.replace(buffers, code_count=jnp.ones_like(buffers.code_count))
    opt = OPT if decay_all is None else {**OPT, "group_wd_params": not decay_all}
    rate = schedule(OptimConfig(schedule="cosine", warmup_steps=2, steps=10))
    model = {name: int(value) if isinstance(value, bool) else value for name, value in vars(CFG).items()}
    ours = ("reset_at_documents", "restart_dead_codes", "dead_code_below", "remat")
    config = {name: value for name, value in model.items() if name not in ours} | {"update_len": UPDATE, "opt": opt}
    start = to_reference(params, buffers, CFG)
    start["token_embedder/bias_out"] = np.linspace(-1, 1, CFG.n_vocab, dtype=np.float32)
    arrays: dict[str, Any] = {"meta": np.array(json.dumps({"family": "vq", "kind": "train", "config": config}))}
    arrays |= {f"params/{name}": value for name, value in start.items()}
    leaves = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(params)}
    stacks = {
        name: spec.stack_shape for name, spec in named_leaves(family.param_specs(CFG), lambda x: hasattr(x, "axes"))
    }
    momenta = {name: np.zeros(leaf.shape, jnp.bfloat16) for name, leaf in leaves.items()}
    unused, count = np.asarray(start["token_embedder/bias_out"], np.float64), 0
    for call in (1, 2):
        ids = generator.integers(3, CFG.n_vocab, (ROWS, LENGTH + 1)).astype(np.int32)
        full = Batch(
            inputs=ids[:, :-1],
            targets=ids[:, 1:],
            doc_ids=np.zeros((ROWS, LENGTH), np.int32),
            loss_mask=np.ones((ROWS, LENGTH), np.float32),
        )
        arrays |= {
            f"in/batch{call}/{name}": getattr(full, name) for name in ("inputs", "targets", "doc_ids", "loss_mask")
        }
        carry = family.FAMILY.empty_carry(CFG, ROWS)
        for at in range(0, LENGTH, UPDATE):
            now = params_from_leaves(leaves, CFG)
            found, carry, buffers = gradient(now, buffers, carry, full.slice(at, at + UPDATE))
            slope = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(found)}
            noise = {n: 1e-7 * np.abs(g).max() * generator.normal(size=g.shape) * (g != 0) for n, g in slope.items()}
            slope = {name: value + noise[name] for name, value in slope.items()}
            norm = np.sqrt(sum(float((value**2).sum()) for value in slope.values()))
            slope = {name: value * min(1.0, 0.1 / norm) for name, value in slope.items()}
            wide = {name: value.astype(np.float64) for name, value in momenta.items()}
            mixed = {name: (1 - b1) * slope[name] + b1 * wide[name] for name in slope}
            signs = {name: np.sign(value) for name, value in mixed.items()}
            change(count, mixed, signs)
            for name, leaf in leaves.items():
                vector = leaf.ndim - len(stacks[name]) == 1
                decay = 2e-4 if decay_all or not vector else 0.0
                leaves[name] = leaf - 1e-3 * float(rate(count)) * signs[name] - decay * leaf
                momenta[name] = (B2 * wide[name] + (1 - B2) * slope[name]).astype(np.float32).astype(jnp.bfloat16)
            unused = unused - (2e-4 * unused if decay_all else 0.0)
            count += 1
        after = to_reference(params_from_leaves(leaves, CFG), buffers, CFG) | {"token_embedder/bias_out": unused}
        arrays |= {f"out/after{call}/{name}": np.asarray(value, np.float32) for name, value in after.items()}
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    return path


def flips(verification: Verification) -> int:
    return verification.to_json()["sign_flips"]


def failed(verification: Verification) -> list[str]:
    return [check.name for check in verification.checks if not check.passed]


def turn(name: str, count: int, *, near: bool) -> tuple[Change, list[float]]:
    """Turns the sign at one update: where the momentum is nearest to zero, or furthest from it."""
    sizes: list[float] = []

    def change(update: int, mixed: Leaves, signs: Leaves) -> None:
        if update == count:
            size = np.abs(mixed[name])
            at = np.unravel_index(int(np.argmin(size) if near else np.argmax(size)), size.shape)
            sizes.append(float(size[at] / size.max()))
            signs[name][at] *= -1

    return change, sizes


@pytest.mark.slow
def test_signs_that_noise_turned_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lion_file(tmp_path / "lion.npz")
    found = verify_file(path)
    assert not failed(found)
    assert found.worst < 1e-5
    n_sign = 3 * sum(leaf.size for _, leaf in named_leaves(family.param_specs(CFG), lambda x: hasattr(x, "axes")))
    assert 1 <= flips(found) < 0.001 * n_sign
    monkeypatch.setattr(lion, "EXACT", 0.0)
    monkeypatch.setattr(lion, "ROUNDING", 0.0)
    assert failed(verify_file(path))  # where no sign is in doubt, none is excused


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_ambiguous_sign_is_counted_and_followed(tmp_path: Path, count: int) -> None:
    """At the second update of the first call, and at the first of the second."""
    change, sizes = turn("units/w_kvg", count, near=True)
    found = verify_file(lion_file(tmp_path / "lion.npz", change))
    assert not failed(found), (failed(found), sizes)
    assert 1 <= flips(found) <= 20


def test_wrong_sign_fails(tmp_path: Path) -> None:
    change, _ = turn("units/w_kvg", 2, near=False)
    found = verify_file(lion_file(tmp_path / "lion.npz", change))
    assert any("kvg_proj" in name for name in failed(found))


def test_other_errors_fail(tmp_path: Path) -> None:
    assert failed(verify_file(lion_file(tmp_path / "b1.npz", b1=0.9)))
    path = lion_file(tmp_path / "lion.npz")
    with np.load(path) as file:
        arrays = dict(file.items())
    name = "out/after2/transformer_layers_0/scanned_attn1/q_proj/kernel"
    for size in (3e-5, 2e-3):  # the second is what a turned sign would leave
        wrong = np.array(arrays[name])
        wrong[3, 4] += size * (np.abs(wrong).max() if size < 1e-4 else 1.0)
        with open(tmp_path / "wrong.npz", "wb") as file:
            np.savez(file, **{**arrays, name: wrong})
        found = verify_file(tmp_path / "wrong.npz")
        assert failed(found) == ["after2/transformer_layers_0/scanned_attn1/q_proj/kernel"], size


def test_decay_of_all_parameters(tmp_path: Path) -> None:
    path = lion_file(tmp_path / "all.npz", decay_all=True)
    assert not failed(verify_file(path))
    with np.load(path) as file:
        arrays = dict(file.items())
    meta = json.loads(str(arrays["meta"]))
    del meta["config"]["opt"]["group_wd_params"]
    with open(tmp_path / "wrong.npz", "wb") as file:
        np.savez(file, **{**arrays, "meta": np.array(json.dumps(meta))})
    names = failed(verify_file(tmp_path / "wrong.npz"))
    assert any(name.endswith(("/g", "/b")) for name in names)
    assert any(name.endswith("bias_out") for name in names)


def test_leaves_go_both_ways() -> None:
    params = map_specs(
        lambda spec: jnp.arange(np.prod(spec.shape), dtype=jnp.float32).reshape(spec.shape), family.param_specs(CFG)
    )
    again = params_from_leaves(leaves_from_reference(to_reference(params, None, CFG), CFG), CFG)
    for (name, ours), (_, theirs) in zip(named_leaves(params), named_leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
