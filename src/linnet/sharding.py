"""The mesh, and one table of rules from a weight's logical axes to the mesh's axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from linnet import quant
from linnet.errors import refuse
from linnet.params import Spec, map_specs
from linnet.weights import Weights

MESH_AXES = ("data", "fsdp", "model", "expert")

# Which mesh axis cuts which logical axis. Names that are not here (layers) stay whole on every device.
RULES: Mapping[str, str] = {
    "batch": "data",
    "model": "fsdp",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "hidden": "model",
    "experts": "expert",
}


def make_mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh with all axes, of size 1 unless asked for."""
    sizes = sizes or {}
    for name, size in sizes.items():
        if name not in MESH_AXES:
            raise refuse("mesh axis", name, f"one of {', '.join(MESH_AXES)}", "rename it")
        if size < 1:
            raise refuse(f"mesh axis {name}", size, "at least 1", "leave it out for 1")
    shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
    if math.prod(shape) > jax.device_count():
        raise refuse(
            "mesh", dict(sizes), f"no larger than the {jax.device_count()} devices there are", "make an axis smaller"
        )
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=jax.devices()[: math.prod(shape)]
    )


def partition(spec: Spec, mesh: Mesh) -> PartitionSpec:
    """Cuts each axis that has a rule and divides evenly; a mesh axis is used once, by the first that can."""
    used: set[str] = set()
    cuts: list[str | None] = []
    for size, name in zip(spec.shape, spec.axes, strict=True):
        axis = RULES.get(name) if name is not None else None
        if axis is None or axis in used or size % mesh.shape[axis]:
            cuts.append(None)
        else:
            used.add(axis)
            cuts.append(axis)
    return PartitionSpec(*cuts)


def shardings(specs: Any, mesh: Mesh) -> Any:
    return map_specs(lambda spec: NamedSharding(mesh, partition(spec, mesh)), specs)


def abstract_weights(specs: Any, mesh: Mesh, weights: Weights, n_group: int = 1) -> Any:
    """Shapes, types and places of weights held in so many bits: what a program is compiled for without the weights. `n_group`: of
    the scales of matrices whose inputs are cut by the mesh, as in Grok-1's release."""

    def one(spec: Spec) -> Any:
        cuts = partition(spec, mesh)

        def array(shape: tuple[int, ...], dtype: Any, cuts: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, cuts))

        held = quant.held(spec, weights)
        if held != "int8":
            return array(spec.shape, held, cuts)
        groups = n_group if cuts[-2] is not None else 1
        shape = (*spec.shape[:-2], groups, spec.shape[-1])
        return quant.Quantized(
            weight=cast(Any, array(spec.shape, jnp.int8, cuts)),
            scales=cast(Any, array(shape, jnp.bfloat16, PartitionSpec(*cuts[:-2], None, cuts[-1]))),
        )

    return map_specs(one, specs)


def bytes_per_device(arrays: Any) -> int:
    """Of sharded arrays, abstract or not."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)
    )
