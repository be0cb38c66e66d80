"""Memory for serving a language model, from shapes only: weights and slots per device of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from linnet.core import params
from linnet.core.dtypes import WeightDtype
from linnet.models.base import TokenFamily
from linnet.models.tensor_parallel import decoding_rules
from linnet.parallel import sharding
from linnet.parallel.mesh import MESH_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes per device."""

    weight_bytes: float
    """Including the weights prepared for decoding."""
    read_bytes: float
    """The part of `weight_bytes` that is read for each token."""
    slot_bytes: float
    """One slot at the longest context. What the mesh does not shard is replicated."""


def serving_memory(
    family: TokenFamily,
    model: Any,
    sizes: Mapping[str, int],
    weights: WeightDtype,
    groups: Mapping[str, int] | None = None,
) -> ServingMemory:
    """Return the memory for serving a model on a mesh of these sizes (axes that are missing have size 1).

    `groups`: scale groups of 8-bit weights by name, if they are known from files. By default a matrix whose inputs are sharded has a
    group per shard.
    """
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    mesh: Any = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    n_part, specs = sizes.get("model", 1), family.param_specs(model)
    sharded_weights = sharding.abstract_weights(
        specs, mesh, weights, decoding_rules(family.rules), n_group=n_part if groups is None else groups
    )
    total = read = float(sharding.bytes_per_device(sharded_weights))
    if family.decoder.copies_weights:
        buffers = params.abstract(family.buffer_specs(model))
        prepared = jax.eval_shape(lambda p, b: family.decoder.prepare(p, b, model), sharded_weights, buffers)
        read = shape_bytes(prepared) * total / shape_bytes(sharded_weights)
        total += read
    slots = jax.eval_shape(lambda: family.decoder.init_slots(model, 1))
    sharded = shape_bytes(family.decoder.sharded_slots(slots, model))
    slot_bytes = sharded / n_part + shape_bytes(slots) - sharded
    return ServingMemory(weight_bytes=total, read_bytes=read, slot_bytes=slot_bytes)


def shape_bytes(tree: Any) -> int:
    """Return the bytes of arrays of these shapes, without sharding."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
