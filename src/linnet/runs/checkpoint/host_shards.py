"""Host copies of the shards that this process writes to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from linnet.core.pytree import named_leaves
from linnet.runs.checkpoint import checksum

STORED_NAMES = {"consecutive_nonfinite": "bad_run"}
"""Names in checkpoints of the leaves whose field has been renamed since the first version."""


@dataclasses.dataclass(frozen=True, repr=False)
class HostShards:
    """This process's shards of a state on the host, by leaf name. PRNG keys are stored as key data."""

    arrays: dict[str, Array]
    """Arrays for Orbax, which writes the same shards of them."""
    boxes: dict[str, list[checksum.Box]]
    kinds: dict[str, str]


def nbytes(state: Any) -> int:
    """Size of the complete state, over all processes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in named(state).values())


def copy_to_host(state: Any) -> HostShards:
    """Copy the shards that this process writes: those with replica id 0."""
    leaves = {name: jnp.asarray(leaf) for name, leaf in named(state).items()}
    for leaf in leaves.values():
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()  # Start all transfers before waiting for the first.
    copies = {name: _copy_shards(leaf) for name, leaf in leaves.items()}
    return HostShards(
        arrays={name: array for name, (array, _) in copies.items()},
        boxes={name: boxes for name, (_, boxes) in copies.items()},
        kinds=kinds(state),
    )


def _copy_shards(leaf: Array) -> tuple[Array, list[checksum.Box]]:
    """Return the leaf for Orbax, and the shards of it that this process writes.

    For an array on an accelerator, the host buffer is a real copy. On CPU it is a view of memory that the next step may
    overwrite, so the shards are copied and the array for Orbax is built from the copies.
    """
    first = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    if not _on_cpu(leaf):
        return leaf, [(checksum.start_of(shard), np.asarray(shard.data)) for shard in first]
    copied = {shard.device: _aligned_copy(np.asarray(shard.data)) for shard in first}
    data = [
        jax.device_put(copied[shard.device], shard.device, may_alias=True) if shard.device in copied else shard.data
        for shard in leaf.addressable_shards
    ]
    array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, data)
    return array, [(checksum.start_of(shard), copied[shard.device]) for shard in first]


def _aligned_copy(piece: np.ndarray) -> np.ndarray:
    """Copy to a 64-byte aligned buffer, which JAX can use without copying it again."""
    room = np.empty(piece.nbytes + 64, np.uint8)
    copy = room[-room.ctypes.data % 64 :][: piece.nbytes].view(piece.dtype).reshape(piece.shape)
    np.copyto(copy, piece)
    return copy


def stored_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its name in a checkpoint."""
    return ((STORED_NAMES.get(name, name), leaf) for name, leaf in named_leaves(tree))


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, with PRNG keys as key data. Works on arrays and on abstract leaves."""
    pairs = list(stored_leaves(tree))
    named = {name: _numbers(leaf) for name, leaf in pairs}
    assert len(named) == len(pairs), f"two leaves share a name among {sorted(name for name, _ in pairs)}"
    return named


def kinds(tree: Any) -> dict[str, str]:
    """Return dtype and shape of every leaf, as in `float32[3, 4]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in stored_leaves(tree)}


def not_empty(leaves: dict[str, Any]) -> dict[str, Any]:
    """Drop arrays without elements, which Orbax rejects. The manifest records their shape and dtype, which is enough."""
    return {name: leaf for name, leaf in leaves.items() if leaf.size}


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _on_cpu(leaf: Array) -> bool:
    return next(iter(leaf.sharding.device_set)).platform == "cpu"
