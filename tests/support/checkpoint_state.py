"""A state with all that a trainer's has, and two checkpoints of it, for the tests of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from linnet.core.pytree import named_leaves, pytree
from linnet.runs.checkpoint.manager import Checkpoints


@pytree
class Layer:
    kernel: Array
    scale: Array
    bias: Array | None


@pytree
class State:
    step: Array
    layers: tuple[Layer, ...]
    opt_state: Any
    carry: dict[str, Array]
    key: Array
    key_data: Array


def make_state(seed: int) -> State:
    """What a trainer holds, with the values that inexact ways would lose: NaN payloads, -0.0, tiny and huge ones."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32).view(np.float32)
    brain = jnp.asarray(rng.standard_normal((3, 5)), jnp.bfloat16).at[0, 0].set(-0.0).at[0, 1].set(jnp.nan)
    layers: Any = tuple(
        Layer(kernel=jnp.asarray(rng.standard_normal((64, 48)), jnp.float32), scale=brain, bias=None) for _ in range(2)
    )
    key = jax.random.key(seed)
    return State(
        step=jnp.int32(seed),
        layers=layers,
        opt_state=optax.adamw(1e-3).init(layers),
        carry={"odd": jnp.asarray(odd), "empty": jnp.zeros((0, 3)), "count": jnp.uint32(2**32 - 1)},
        key=jax.random.split(key, 2),
        key_data=jax.random.key_data(key),
    )


TARGET = jax.eval_shape(lambda: make_state(0))


def bits(tree: Any) -> dict[str, bytes]:
    def content(leaf: Any) -> bytes:
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes()

    return {name: content(leaf) for name, leaf in named_leaves(tree)}


@contextlib.contextmanager
def two_saved(folder: Path) -> Iterator[Checkpoints]:
    """Steps 1 and 2, committed."""
    saver = Checkpoints(folder, keep=3)
    for step in (1, 2):
        saver.save(step, make_state(step), extra={"seed": step})
    saver.wait()
    yield saver
    saver.close()
