"""`Spec`: each weight is declared once. Init, abstract shapes, counts, shardings and restore targets are derived from it."""

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
    """Declaration of one weight.

    `axes` names each dimension. Leading dimensions named "layers" or "experts" form a stack; init, weight decay and optimizers
    treat its members separately. `fan_in` is a normal of variance 1 / (product of all dimensions but the last), `fan_out` a normal
    of variance 1 / (last dimension), `uniform` is uniform on +-1 / sqrt(n_in), which is torch's default for linear layers."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init = "fan_in"
    dtype: Any = jnp.float32
    min_dtype: WeightDtype = "float32"
    """Lowest precision allowed for inference: int8 for matrices that are only used in matmuls."""
    n_in: int | None = None
    """Number of inputs of the layer, for `uniform` (a bias needs it). None: the product of all dimensions but the last."""

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"shape {self.shape} and axes {self.axes} differ in length"

    @property
    def stack_shape(self) -> tuple[int, ...]:
        n = next((i for i, axis in enumerate(self.axes) if axis not in STACKS), len(self.axes))
        return self.shape[:n]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one member of the stack, as in a reference implementation without stacking."""
        return self.shape[len(self.stack_shape) :]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def map_specs(f: Callable[[Spec], Any], specs: Any) -> Any:
    return jax.tree.map(f, specs, is_leaf=is_spec)


def init(specs: Any, key: PRNGKeyArray) -> Any:
    """Initialize the weights. Each leaf's key is derived from its name, so adding a weight does not change the others."""
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
