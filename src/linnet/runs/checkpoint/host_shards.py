"""The share of a state that this process writes to a checkpoint, copied off the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from linnet.core.pytree import named_leaves
from linnet.runs.checkpoint import checksum


@dataclasses.dataclass(frozen=True, repr=False)
class HostShards:
    """This process's share of a state, off the device: pieces of the leaves by name, random keys as their numbers."""

    arrays: dict[str, Array]
    """For Orbax, which takes the same pieces of them."""
    boxes: dict[str, list[checksum.Box]]
    kinds: dict[str, str]


def nbytes(state: Any) -> int:
    """Of the whole state, over all processes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in named(state).values())


def copy_to_host(state: Any) -> HostShards:
    """Copies what this process is to write: of the pieces that several devices hold, those called the first copy."""
    leaves = {name: jnp.asarray(leaf) for name, leaf in named(state).items()}
    for leaf in leaves.values():
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()  # All are on their way before the first is waited for.
    shares = {name: _share(leaf) for name, leaf in leaves.items()}
    return HostShards(
        arrays={name: array for name, (array, _) in shares.items()},
        boxes={name: boxes for name, (_, boxes) in shares.items()},
        kinds=kinds(state),
    )


def _share(leaf: Array) -> tuple[Array, list[checksum.Box]]:
    """What this process writes of a leaf, and the leaf as Orbax is to see it.

    The host's copy of an array on an accelerator is a real one. On CPU it is a view of memory that the next step may
    overwrite: there the pieces are copied, and the array that Orbax gets is made of these copies.
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
    """A copy that JAX can use as it stands: what does not begin at a multiple of 64 bytes, it copies again."""
    room = np.empty(piece.nbytes + 64, np.uint8)
    copy = room[-room.ctypes.data % 64 :][: piece.nbytes].view(piece.dtype).reshape(piece.shape)
    np.copyto(copy, piece)
    return copy


def named(tree: Any) -> dict[str, Any]:
    """The leaves by name, with random keys as their numbers. Works on arrays and on abstract leaves."""
    pairs = list(named_leaves(tree))
    named = {name: _numbers(leaf) for name, leaf in pairs}
    assert len(named) == len(pairs), f"two leaves share a name among {sorted(name for name, _ in pairs)}"
    return named


def kinds(tree: Any) -> dict[str, str]:
    """Dtype and shape of every leaf, as in `float32[3, 4]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(tree)}


def not_empty(leaves: dict[str, Any]) -> dict[str, Any]:
    """Orbax refuses arrays without elements. Their shape and dtype are in the manifest, and that is all of them."""
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
