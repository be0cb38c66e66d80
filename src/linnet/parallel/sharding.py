"""Sharding by logical axes: one table of rules per model family maps each logical axis to a mesh axis.

The compiler (GSPMD) partitions the programs accordingly. Where its result would be poor, a computation is written per device
instead and run by `shard_map_by_axes`, with explicit collectives only at its boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from linnet.core import quant
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.core.params import Spec, is_spec, map_specs
from linnet.core.pytree import leaf_name, tree_of
from linnet.parallel.mesh import BATCH_AXES, MESH_AXES, mesh_text, n_devices, parse_mesh

T = TypeVar("T")
LogicalAxes = tuple[str | None, ...]
"""Names of an array's axes. None: the axis is not sharded."""
LogicalAxisRules = Mapping[str, str | tuple[str, ...]]
"""Maps a logical axis to the mesh axis or axes that shard it. Logical axes without a rule (layers) are not sharded."""

ROWS: LogicalAxisRules = {"batch": BATCH_AXES}
"""The batch rule, part of every family's table."""


def is_logical_axes(x: Any) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def is_pspec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


class _LeafCheck(type):
    """Type of `AxesTree` and `PSpecTree`. They exist for type checkers, and for `isinstance`, which looks at a tree's leaves."""

    is_leaf: Callable[[Any], bool]

    def __instancecheck__(cls, tree: Any) -> bool:
        return all(map(cls.is_leaf, jax.tree.leaves(tree, is_leaf=cls.is_leaf)))


class AxesTree(Generic[T], metaclass=_LeafCheck):
    """A pytree of type `T` that has logical axes in place of its arrays."""

    is_leaf = staticmethod(is_logical_axes)

    @staticmethod
    def of(kind: type[T], /, **fields: LogicalAxes | AxesTree[Any] | None) -> AxesTree[T]:
        return cast(AxesTree[T], kind(**fields))


class PSpecTree(Generic[T], metaclass=_LeafCheck):
    """A pytree of type `T` that has PartitionSpecs in place of its arrays, or of its subtrees: one for all arrays of a subtree."""

    is_leaf = staticmethod(is_pspec)

    @staticmethod
    def of(kind: type[T], /, **fields: PSpecs | tuple[PSpecs, ...] | None) -> PSpecTree[T]:
        return cast(PSpecTree[T], kind(**fields))


Axes = LogicalAxes | AxesTree[Any]
PSpecs = PartitionSpec | PSpecTree[Any]


def make_mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """Make a mesh with all axes. A single process may use the first of its devices only; several processes must use all devices."""
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(sizes or {})
    n, there = n_devices(sizes), jax.device_count()
    if n > there or (jax.process_count() > 1 and n != there):
        needs = (
            f"as many devices as there are ({there})" if n <= there else f"no more than the {there} devices there are"
        )
        fix = f"use --mesh data={there}, or any sizes whose product is {there}" if there > 1 else _fix_one_device(n)
        raise invalid("mesh", mesh_text(sizes) or "one device", needs, fix)
    shape = tuple(sizes[name] for name in MESH_AXES)
    types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=jax.devices()[:n])


def open_mesh(text: str) -> Mesh:
    return make_mesh(parse_mesh(text))


def _fix_one_device(n: int) -> str:
    return (
        f'use --mesh "" for one device, or start {n} processes with `linnet launch --processes {n} -- ...`; to try it out on one '
        f"machine's processor, set XLA_FLAGS=--xla_force_host_platform_device_count={n}"
    )


def partition(
    shape: tuple[int, ...], axes: LogicalAxes, mesh: Mesh | AbstractMesh, rules: LogicalAxisRules
) -> PartitionSpec:
    """Return the PartitionSpec: each axis with a rule is sharded if it divides evenly. A mesh axis is used once, by the first such
    axis."""
    used: set[str] = set()
    entries: list[tuple[str, ...] | str | None] = []
    for size, name in zip(shape, axes, strict=True):
        rule = rules.get(name) if name is not None else None
        mesh_axes = (rule,) if isinstance(rule, str) else rule or ()
        if not mesh_axes or used & set(mesh_axes) or size % math.prod(mesh.shape[axis] for axis in mesh_axes):
            entries.append(None)
        else:
            used |= set(mesh_axes)
            entries.append(rule)
    return PartitionSpec(*entries)


def named_sharding(shape: tuple[int, ...], axes: LogicalAxes, mesh: Mesh, rules: LogicalAxisRules) -> NamedSharding:
    return NamedSharding(mesh, partition(shape, axes, mesh, rules))


def named_shardings(arrays: Any, axes: Axes | None, mesh: Mesh, rules: LogicalAxisRules) -> Any:
    """Return the shardings of a tree of arrays (concrete or abstract), given their logical axes."""
    return map_axes(lambda a, x: named_sharding(x.shape, a, mesh, rules), axes, arrays)


def map_axes(f: Callable[..., Any], axes: Any, *trees: Any) -> Any:
    """Return the tree of `f(axes, *leaves)`, called with the logical axes of each array and the corresponding leaves of `trees`."""
    return jax.tree.map(f, axes, *trees, is_leaf=is_logical_axes)


def shardings(specs: Any, mesh: Mesh, rules: LogicalAxisRules) -> Any:
    return map_specs(lambda spec: named_sharding(spec.shape, spec.axes, mesh, rules), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


# Inside jitted programs. The mesh is that of `jax.set_mesh`; with one device, or without a mesh, these have no effect.


def current() -> AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    inside = AxisType.Manual in mesh.axis_types  # within shard_map, where arrays are local shards
    return None if mesh.empty or mesh.size == 1 or inside else mesh


def axis_size(axis: str) -> int:
    mesh = current()
    return 1 if mesh is None else mesh.shape[axis]


def constrain(x: Array, axes: LogicalAxes, rules: LogicalAxisRules) -> Array:
    """Constrain the sharding of an intermediate array."""
    mesh = current()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition(x.shape, axes, mesh, rules))


def shard_map_by_axes(
    f: Callable[..., Any],
    rules: LogicalAxisRules,
    args: tuple[Any, ...],
    ins: tuple[Axes | None, ...],
    out: Axes | tuple[Axes, ...],
    like: Any,
) -> Any:
    """Compute `f(*args)` under shard_map, with shardings given as logical axes, `ins` for the arguments and `out` for the result, of
    which `like` has the global shapes. Unsharded outputs must be identical on all devices."""
    mesh = current()
    if mesh is None:
        return f(*args)

    def one(axes: LogicalAxes, x: Any) -> PSpecs:
        pspec = partition(x.shape, axes, mesh, rules)
        return quantized_pspec(pspec, x.n_group, mesh) if isinstance(x, quant.Quantized) else pspec

    return shard_map(f, args, map_axes(one, ins, args), map_axes(one, out, like))


def shard_map(
    f: Callable[..., Any], args: tuple[Any, ...], ins: tuple[PSpecs, ...], out: PSpecs | tuple[PSpecs, ...]
) -> Any:
    """Compute `f(*args)` per device on the current mesh. `ins` and `out` are PartitionSpecs or tree prefixes of them. Unsharded
    outputs must be identical on all devices."""
    return jax.shard_map(f, in_specs=ins, out_specs=out, check_vma=False)(*args)


def quantized_pspec(weight: PartitionSpec, n_group: int, mesh: Mesh | AbstractMesh) -> PSpecTree[quant.Quantized]:
    return PSpecTree.of(quant.Quantized, weight=weight, scales=_scales_pspec(weight, n_group, mesh))


def _scales_pspec(weight: PartitionSpec, n_group: int, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the PartitionSpec of a quantized weight's scales. If the input axis is sharded, the scale groups are sharded with it when
    there are several and they divide evenly; otherwise they are replicated."""
    inputs = weight[-2]
    mesh_axes = (inputs,) if isinstance(inputs, str) else inputs or ()
    n_shard = math.prod(mesh.shape[axis] for axis in mesh_axes)
    groups = inputs if n_group > 1 and n_group % n_shard == 0 else None
    return PartitionSpec(*weight[:-2], groups, weight[-1])


# Transfers from and to the host.


def to_host(tree: Any) -> Any:
    """Return the complete arrays as numpy on every process. Only for small arrays: those spread over processes are all-gathered."""
    return jax.tree.map(_complete_on_host, tree)


def _complete_on_host(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def host_to_global(x: Any, axes: LogicalAxes, mesh: Mesh, rules: LogicalAxisRules) -> jax.Array:
    """Make a global array from one that every process has completely."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, named_sharding(x.shape, axes, mesh, rules), lambda index: x[index])


def process_batch_slice(n_row: int, mesh: Mesh, rules: LogicalAxisRules) -> tuple[int, int]:
    """Return (index, count): the batch rows this process must read for its devices, as one of `count` equal slices."""
    local = named_sharding((n_row,), ("batch",), mesh, rules).addressable_devices_indices_map((n_row,)).values()
    ranges = [cast(tuple[slice], index)[0].indices(n_row)[:2] for index in local]
    first, last = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    counts = (n for n in range(n_row, 0, -1) if n_row % n == 0)
    n = next(n for n in counts if first // (n_row // n) == (last - 1) // (n_row // n))
    return first // (n_row // n), n


def global_batch(tree: Any, batch_slice: tuple[int, int], n_row: int, mesh: Mesh, rules: LogicalAxisRules) -> Any:
    """Make a global batch from the slice of rows (see `process_batch_slice`) that this process has read."""
    index, count = batch_slice
    first = index * (n_row // count)

    def one(part: Any) -> jax.Array:
        part = np.asarray(part)
        shape = (n_row, *part.shape[1:])
        sharding = named_sharding(shape, ("batch", *(None,) * (part.ndim - 1)), mesh, rules)

        def read(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(n_row)
            return part[start - first : stop - first]

        return jax.make_array_from_callback(shape, sharding, read)

    return jax.tree.map(one, tree)


def abstract_weights(
    specs: Any,
    mesh: Mesh | AbstractMesh,
    weights: WeightDtype,
    rules: LogicalAxisRules,
    n_group: int | Mapping[str, int] = 1,
) -> Any:
    """Return the shapes, dtypes and shardings of weights stored as `weights`, to compile a program without them. `n_group`: scale
    groups of matrices whose input axis is sharded, as in Grok-1's release; or of every matrix, by name."""

    def one(path: tuple[Any, ...], spec: Spec) -> Any:
        pspec = partition(spec.shape, spec.axes, mesh, rules)

        def array(shape: tuple[int, ...], dtype: Any, pspec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, pspec))

        dtype = quant.storage_dtype(spec, weights)
        if dtype != "int8":
            return array(spec.shape, dtype, pspec)
        if isinstance(n_group, int):
            groups = n_group if pspec[-2] is not None else 1
        else:
            groups = n_group[leaf_name(path)]
        scales = (*spec.shape[:-2], groups, spec.shape[-1])
        return tree_of(
            quant.Quantized,
            weight=array(spec.shape, jnp.int8, pspec),
            scales=array(scales, jnp.bfloat16, _scales_pspec(pspec, groups, mesh)),
        )

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)


def bytes_per_device(arrays: Any) -> int:
    """Return the bytes per device of sharded arrays (concrete or abstract)."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)
    )
