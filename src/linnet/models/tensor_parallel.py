"""Tensor and expert parallel decoding: each device holds a shard of the weights and slots and runs the same program.

Heads (with a single head, its values), hidden units and the vocabulary are sharded over the mesh's model axis, experts over its
expert axis; slots are not sharded by rows. Programs are written for one device's shard and run by `shard_map`, so all collectives are
explicit here: a psum of each shard's contribution to the hidden vectors, and an all-gather of the logits. On a single device none of
this is used.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from linnet.core.errors import invalid
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import replace
from linnet.core.quant import Bf16Bits, Quantized, Weight
from linnet.nn.moe import Routing
from linnet.parallel import sharding
from linnet.parallel.mesh import MESH_AXES
from linnet.parallel.sharding import AxesTree, LogicalAxes, LogicalAxisRules, PSpecs, PSpecTree, shard_map

T = TypeVar("T")
W = TypeVar("W", bound=Weight)
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Number of shards of a model along each mesh axis, and the collectives between them."""

    model: int = 1
    expert: int = 1

    def psum(self, x: Float[Array, "*B D"], *axes: str) -> Float[Array, "*B D"]:
        """Sum over all shards in float32, because summing values rounded to 16 bits would lose precision."""
        axes = tuple(axis for axis in axes if getattr(self, axis) > 1)
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x

    def embedding_lookup(self, table: W, index: Int[Array, "*B"], n_row: int) -> W:
        """Look up rows of a table with `n_row` rows that may be sharded. The result is exact: other shards contribute zeros."""
        if table.shape[0] >= n_row:
            return jax.tree.map(lambda x: x[index], table)
        here = index - jax.lax.axis_index("model") * table.shape[0]
        mine = ((here >= 0) & (here < table.shape[0]))[..., None]

        def one(x: Array) -> Array:
            wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
            return jax.lax.psum(jnp.where(mine, x[here].astype(wide), 0), "model").astype(x.dtype)

        return jax.tree.map(one, table)

    def all_gather_logits(self, logits: Float[Array, "*B A"], n: int) -> Float[Array, "*B A"]:
        """All-gather the columns of logits that may be sharded over the vocabulary."""
        if logits.shape[-1] == n:
            return logits
        return jax.lax.all_gather(logits, "model", axis=logits.ndim - 1, tiled=True)[..., :n]

    def first_expert(self, n_expert: int) -> int | Int[Array, ""]:
        """Return the index of this shard's first expert."""
        return jax.lax.axis_index("expert") * (n_expert // self.expert) if self.expert > 1 else 0

    def local_routing(self, routing: Routing) -> Routing:
        """Return the routing for this shard's experts: pairs routed to other shards get the id of no expert."""
        if self.expert == 1:
            return routing
        n_expert = routing.probability.shape[-1]
        n_here = n_expert // self.expert
        here = routing.chosen - self.first_expert(n_expert)
        mine = (here >= 0) & (here < n_here)
        return replace(routing, chosen=jnp.where(mine, here, n_here), probability=routing.probability[:, :n_here])


ONE_DEVICE = TensorParallel()


def current_tp() -> TensorParallel:
    """Return the shards of the current mesh."""
    return TensorParallel(model=sharding.axis_size("model"), expert=sharding.axis_size("expert"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """How the current mesh shards a model for decoding."""

    cfg: Any
    """The config of one device's shard."""
    weights: PSpecs
    slots: PSpecs


Shard = Callable[[Any, Any, Any], ShardedModel]
"""`(prepared, slots, cfg)`. Called on a mesh only."""


def tp_call(
    run: Callable[..., tuple[Any, ...]], shard: Shard | None, prepared: Any, slots: Any, cfg: Any, *rest: Any
) -> tuple[Any, ...]:
    """Call `run(prepared, slots, cfg, tp, *rest)`, on a mesh for each device's shard. `run` returns slots and replicated results.
    Without `shard` the model is not sharded."""
    if shard is None or sharding.current() is None:
        return run(prepared, slots, cfg, ONE_DEVICE, *rest)
    tp, sharded = current_tp(), shard(prepared, slots, cfg)

    def here(prepared: Any, slots: Any, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        slots, *outputs = run(prepared, slots, sharded.cfg, tp, *rest)
        return slots, outputs

    ins = (sharded.weights, sharded.slots, REPLICATED)
    slots, outputs = shard_map(here, (prepared, slots, rest), ins, (sharded.slots, REPLICATED))
    return slots, *outputs


def decoding_rules(rules: LogicalAxisRules) -> LogicalAxisRules:
    """Keep only tensor and expert parallel rules: rows and the model width are replicated, so decoding gathers no weights."""
    return {name: axis for name, axis in rules.items() if axis in ("model", "expert")}


def pspec(shape: tuple[int, ...], axes: LogicalAxes, rules: LogicalAxisRules) -> PartitionSpec:
    mesh = sharding.current()
    assert mesh is not None, "only on a mesh"
    return sharding.partition(shape, axes, mesh, rules)


def pspecs(axes: AxesTree[T], arrays: T, rules: LogicalAxisRules) -> PSpecTree[T]:
    """Return the PartitionSpec of every array for decoding, given its logical axes."""
    rules = decoding_rules(rules)
    return sharding.map_axes(lambda a, x: pspec(x.shape, a, rules), axes, arrays)


def constrain(axes: AxesTree[T], arrays: T, rules: LogicalAxisRules) -> T:
    """Shard every array for decoding, inside a program; without a mesh nothing changes."""
    rules = decoding_rules(rules)
    return sharding.map_axes(lambda a, x: sharding.constrain(x, a, rules), axes, arrays)


def weight_pspecs(specs: T, weights: T, rules: LogicalAxisRules) -> PSpecTree[T]:
    """Return PartitionSpecs for decoding of weights of any dtype. If the inputs of an 8-bit matrix are sharded, its scales are sharded
    too or replicated."""
    rules = decoding_rules(rules)

    def one(spec: Spec, leaf: Weight) -> PSpecs:
        weight = pspec(spec.shape, spec.axes, rules)
        if isinstance(leaf, Bf16Bits):
            return PSpecTree.of(Bf16Bits, bits=weight)
        return _quantized_pspec(leaf, weight) if isinstance(leaf, Quantized) else weight

    return jax.tree.map(one, specs, weights, is_leaf=is_spec)


def _quantized_pspec(matrix: Quantized, weight: PartitionSpec) -> PSpecTree[Quantized]:
    mesh = sharding.current()
    assert mesh is not None, "only on a mesh"
    n_shard = mesh.shape["model"]
    if weight[-2] is not None and matrix.n_group > 1 and matrix.n_group % n_shard:
        needs = f"a size that divides the {matrix.n_group} groups of scales of the 8-bit weights"
        raise invalid("mesh axis model", n_shard, needs, f"use --mesh model={matrix.n_group}, or other --weights")
    return sharding.quantized_pspec(weight, matrix.n_group, mesh)


def check_serving(sizes: dict[str, int], field: str, text: str) -> None:
    """Raise an error if the mesh has axes that decoding does not use."""
    for axis in MESH_AXES:
        if sizes[axis] > 1 and axis not in ("model", "expert"):
            instead = "serve more rows with --replicas" if axis == "data" else "shard the model over the axis model"
            needs = "the axes model and expert only, which shard a model"
            raise invalid(field, text, needs, f"leave {axis} out; {instead}")


# Entry points outside of jitted programs.


def put_weights(specs: Any, weights: Any, mesh: Mesh, rules: LogicalAxisRules) -> Any:
    """Shard weights of any dtype over the mesh for decoding."""
    with jax.set_mesh(mesh):
        placement = weight_pspecs(specs, weights, rules)
    return jax.tree.map(lambda x, pspec: jax.device_put(x, NamedSharding(mesh, pspec)), weights, placement)


def mesh_of(arrays: Any) -> Mesh | None:
    """Return the mesh that the arrays are sharded over, or None for a single device."""
    for leaf in jax.tree.leaves(arrays):
        where = getattr(leaf, "sharding", None)
        if isinstance(where, NamedSharding) and where.mesh.size > 1:
            assert isinstance(where.mesh, Mesh)
            return where.mesh
    return None


_ONE_AT_A_TIME = threading.Lock()
"""Serialises the dispatch of multi-device programs: with two threads, devices could start them in different orders and deadlock."""


class OnMesh:
    """Proxy for a decoder that sets the mesh around every call, because threads and generators do not inherit it."""

    def __init__(self, decoder: Any, mesh: Mesh) -> None:
        self._decoder, self._mesh = decoder, mesh

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._decoder, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            with _ONE_AT_A_TIME, jax.set_mesh(self._mesh):
                return found(*args, **options)

        return call


def on_mesh_of(decoder: Any, params: Any) -> Any:
    """Return the decoder, wrapped for the mesh of the params if they are sharded."""
    mesh = mesh_of(params)
    return decoder if mesh is None else OnMesh(decoder, mesh)


def replicate(mesh: Mesh | None, x: Any) -> jax.Array:
    """Put a host array on every device of the mesh. In a multi-process mesh every process passes the same array."""
    if mesh is None:
        return jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(replicate(mesh, jax.random.key_data(x)))
    return sharding.host_to_global(x, (None,) * x.ndim, mesh, {})
