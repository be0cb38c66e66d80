"""Convert the per-layer tensors of a Grok-1 checkpoint to the stacked leaves of a `moe` model, without a stack in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import UserError
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import named_leaves
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import param_specs
from linnet.runs.stored_array import Leaf

FLOATS = (np.dtype("float32"), np.dtype(jnp.bfloat16), np.dtype("float16"))


_quantize = jax.jit(quant.quantize)  # compiled: fewer copies of a matrix at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that is read on demand, in Linnet's layout: [inputs, outputs]."""

    label: str
    """File and name within it, for messages."""
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPair:
    weight: Tensor
    scales: Tensor


Tensors = Mapping[str, Sequence[Tensor] | Sequence[TensorPair]]
"""Tensors of each leaf by name, in order: one, one per layer, or one per expert of each layer."""


def specs_by_name(cfg: MoEConfig) -> dict[str, Spec]:
    return dict(named_leaves(param_specs(cfg), is_leaf=is_spec))


def to_leaves(tensors: Tensors, cfg: MoEConfig, weights: WeightDtype) -> list[Leaf]:
    """Convert to leaves. `weights`: the smallest dtype that matrices are cast to; a smaller dtype in the file is kept."""
    leaves: list[Leaf] = []
    for name, spec in specs_by_name(cfg).items():
        found = tensors[name]
        pairs, floats = [t for t in found if isinstance(t, TensorPair)], [t for t in found if isinstance(t, Tensor)]
        if pairs and floats:
            raise UserError(
                f"{floats[0].label} has dtype {floats[0].dtype}, but {pairs[0].weight.label} is an 8-bit pair: "
                "all layers of a model have the same format. Fix: use files of one checkpoint only."
            )
        leaves += _pair_leaves(name, spec, pairs) if pairs else _float_leaves(name, spec, floats, weights)
    return leaves


def _pair_leaves(name: str, spec: Spec, pairs: Sequence[TensorPair]) -> list[Leaf]:
    first = pairs[0].scales
    for pair in pairs:
        if pair.scales.shape != first.shape:
            raise UserError(
                f"{pair.scales.label} has scales of shape {pair.scales.shape}, but {first.label} of {first.shape}: "
                "all layers of a model have the same format. Fix: use files of one checkpoint only."
            )
    scales = (*spec.shape[:-2], *first.shape[-2:])
    return [
        Leaf(name=f"{name}/weight", shape=spec.shape, dtype=np.dtype("int8"), parts=_reader([p.weight for p in pairs])),
        Leaf(name=f"{name}/scales", shape=scales, dtype=first.dtype, parts=_reader([p.scales for p in pairs])),
    ]


def _float_leaves(name: str, spec: Spec, tensors: Sequence[Tensor], weights: WeightDtype) -> list[Leaf]:
    if spec.min_dtype == "int8" and weights == "int8":
        return _quantized_leaves(name, spec, tensors)
    to = _float_dtype(spec, [tensor.dtype for tensor in tensors], weights)
    return [Leaf(name=name, shape=spec.shape, dtype=to, parts=_reader(tensors, to))]


def _float_dtype(spec: Spec, found: Sequence[np.dtype], weights: WeightDtype) -> np.dtype:
    """Return bfloat16 only if that is lossless or was requested."""
    bfloat16 = np.dtype(jnp.bfloat16)
    if spec.min_dtype != "float32" and (weights != "float32" or all(dtype == bfloat16 for dtype in found)):
        return bfloat16
    return np.dtype("float32")


def _reader(tensors: Sequence[Tensor], to: np.dtype | None = None) -> Callable[[], Iterator[np.ndarray]]:
    def parts() -> Iterator[np.ndarray]:
        for tensor in tensors:
            values = tensor.read()
            yield values if to is None else values.astype(to, copy=False)
            del values  # before the next is read, so that only one is in memory

    return parts


def _quantized_leaves(name: str, spec: Spec, tensors: Sequence[Tensor]) -> list[Leaf]:
    """Quantize while writing. The scales, which are small, are written after the weights, when they are known."""
    scales: list[np.ndarray] = []

    def weights() -> Iterator[np.ndarray]:
        scales.clear()
        for tensor in tensors:
            for matrix in _matrices(tensor.read()):
                made = _quantize(jnp.asarray(matrix, jnp.float32))
                scales.append(np.asarray(made.scales))
                yield np.asarray(made.weight)

    def their_scales() -> Iterator[np.ndarray]:
        yield from scales

    shape = (*spec.shape[:-2], 1, spec.shape[-1])
    return [
        Leaf(name=f"{name}/weight", shape=spec.shape, dtype=np.dtype("int8"), parts=weights),
        Leaf(name=f"{name}/scales", shape=shape, dtype=np.dtype(jnp.bfloat16), parts=their_scales),
    ]


def _matrices(values: np.ndarray) -> Any:
    return values.reshape(-1, *values.shape[-2:])
