"""`Spec`: each weight is declared once. Init, abstract shapes, counts, shardings and restore targets all come from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from linnet.core import rng
from linnet.core.dtypes import WeightDtype
from linnet.core.pytree import leaf_name

Init = Literal["zeros", "ones", "normal", "fan_in", "fan_out", "uniform"]
STACKS = ("layers", "experts")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One weight. `axes` names each dimension; leading ones named "layers" or "experts" mark a stack, whose members init, decay
    and optimisers see one by one. `fan_in` is a normal of variance 1 / (all dimensions but the last), `fan_out` one of variance
    1 / (the last); `uniform` lies within plus or minus 1 / sqrt(n_in), which is torch's default for linear layers."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init = "fan_in"
    dtype: Any = jnp.float32
    least: WeightDtype = "float32"
    """The fewest bits it may be held in where it only reads: int8 for matrices that do nothing but multiply."""
    n_in: int | None = None
    """Inputs of the layer that a `uniform` weight belongs to (a bias needs it); none: all dimensions but the last."""

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"shape {self.shape} and axes {self.axes} differ in length"

    @property
    def stack_shape(self) -> tuple[int, ...]:
        n = next((i for i, axis in enumerate(self.axes) if axis not in STACKS), len(self.axes))
        return self.shape[:n]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of one member of the stack: what a reference without stacking would hold."""
        return self.shape[len(self.stack_shape) :]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def map_specs(f: Callable[[Spec], Any], specs: Any) -> Any:
    return jax.tree.map(f, specs, is_leaf=is_spec)


def init(specs: Any, key: PRNGKeyArray) -> Any:
    """Fresh weights. Each leaf draws from the stream of its own name, so adding one changes no other."""
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: _draw(spec, rng.fold_in_name(key, leaf_name(path))), specs, is_leaf=is_spec
    )


def abstract(specs: Any) -> Any:
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def count(specs: Any) -> int:
    return sum(s.size for s in jax.tree.leaves(specs, is_leaf=is_spec))


def _draw(spec: Spec, key: PRNGKeyArray) -> Array:
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    n_in = max(1, math.prod(spec.layer_shape[:-1])) if spec.n_in is None else spec.n_in
    if spec.init == "uniform":
        bound = 1 / math.sqrt(n_in)
        return jax.random.uniform(key, spec.shape, jnp.float32, -bound, bound).astype(spec.dtype)
    values = jax.random.normal(key, spec.shape, jnp.float32)
    if spec.init == "fan_in":
        values = values / math.sqrt(n_in)
    if spec.init == "fan_out":
        values = values / math.sqrt(spec.shape[-1])
    return values.astype(spec.dtype)
