"""KV cache of `moe` sequences: slots on the device, and the state of one sequence as immutable blocks.

Letters: L layers, B slots, H key heads, T token capacity, K key width, S = BLOCK tokens.

Slots are updated in place. An extracted sequence is a tuple of blocks: full blocks never change again, so the states of one
conversation, and of all sequences with a common prefix, share them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.core.pytree import pytree, replace, static
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES
from linnet.models.tensor_parallel import constrain
from linnet.parallel import sharding
from linnet.parallel.sharding import AxesTree

BLOCK = 128
"""Keys per attention block."""


@pytree
class MoESlots:
    keys: Float[Array, "L B H T K"]
    values: Float[Array, "L B H T K"]
    tokens: Int[Array, "B T"]  # tokens read; prefill uses them to mask padding
    position: Int[Array, " B"]  # tokens read so far


@pytree
class Block:
    keys: Float[Array, "L H S K"]
    values: Float[Array, "L H S K"]
    tokens: Int[Array, " S"]


@pytree
class MoEState:
    """State of one sequence. The last block is zero beyond the tokens read, so that equal states are bit-identical."""

    blocks: tuple[Block, ...]
    n_read: int = static(default=0)


def capacity(cfg: MoEConfig) -> int:
    """Return the capacity of a slot: complete blocks, plus a spare one, because `dynamic_update_slice` would move a write past the end
    back onto earlier tokens."""
    return (-(-cfg.context // BLOCK) + 1) * BLOCK


SLOT_AXES = AxesTree.of(
    MoESlots,
    keys=(None, None, "kv_heads", None, None),
    values=(None, None, "kv_heads", None, None),
    tokens=(None, None),
    position=(None,),
)
BLOCK_AXES = AxesTree.of(
    Block, keys=(None, "kv_heads", None, None), values=(None, "kv_heads", None, None), tokens=(None,)
)
"""Logical axes: on a mesh the KV cache is sharded by key heads."""


def init_slots(cfg: MoEConfig, n: int) -> MoESlots:
    return _empty_slots(cfg, n) if sharding.current() is None else _slots_on_mesh(cfg, n)


@partial(jax.jit, static_argnames=("cfg", "n"))
def _slots_on_mesh(cfg: MoEConfig, n: int) -> MoESlots:
    return constrain(SLOT_AXES, _empty_slots(cfg, n), RULES)


def _empty_slots(cfg: MoEConfig, n: int) -> MoESlots:
    shape = (cfg.n_layer, n, cfg.n_kv_head, capacity(cfg), cfg.d_k)
    return MoESlots(
        keys=jnp.zeros(shape, cfg.dtype),
        values=jnp.zeros(shape, cfg.dtype),
        tokens=jnp.zeros((n, capacity(cfg)), jnp.int32),
        position=jnp.zeros((n,), jnp.int32),
    )


def insert(slots: MoESlots, one: MoEState, i: int) -> MoESlots:
    """Insert a sequence into slot `i` in place; other slots are not changed."""
    for number, block in enumerate(one.blocks):
        slots = _put(slots, block, i, number)
    return _set_position(slots, i, one.n_read)


def single_slot(one: MoEState, cfg: MoEConfig) -> MoESlots:
    """Return a single slot that holds this sequence."""
    slots = init_slots(cfg, 1)
    if sharding.current() is None:
        # Committed to the device like the outputs of programs; otherwise a sequence without blocks would trigger a second compilation.
        slots = jax.device_put(slots, jax.devices()[0])
    return insert(slots, one, 0)


def to_device(one: MoEState) -> MoEState:
    """Move a state from elsewhere to the devices, sharded as the programs expect it."""
    return replace(one, blocks=tuple(_block_to_device(block) for block in one.blocks))


@jax.jit
def _block_to_device(block: Block) -> Block:
    return constrain(BLOCK_AXES, block, RULES)


def extract(slots: MoESlots, i: int, n_read: int, known: MoEState | None = None) -> MoEState:
    """Extract the first `n_read` tokens of slot `i`. Full blocks of `known`, an earlier state of the same sequence, are shared."""
    n_known = 0 if known is None else min(known.n_read, n_read) // BLOCK
    shared = () if known is None else known.blocks[:n_known]
    fresh = tuple(_take(slots, i, number, n_read) for number in range(n_known, -(-n_read // BLOCK)))
    return MoEState(blocks=shared + fresh, n_read=n_read)


def abstract_blocks(cfg: MoEConfig, n_read: int) -> MoEState:
    """Return an abstract state with the shapes of a sequence of `n_read` tokens."""

    def block() -> Block:
        empty = jnp.zeros((cfg.n_layer, cfg.n_kv_head, BLOCK, cfg.d_k), cfg.dtype)
        return Block(keys=empty, values=empty, tokens=jnp.zeros((BLOCK,), jnp.int32))

    return MoEState(blocks=(jax.eval_shape(block),) * -(-n_read // BLOCK), n_read=n_read)


@partial(jax.jit, donate_argnums=0)
def _put(slots: MoESlots, block: Block, i: int | Int[Array, ""], number: int | Int[Array, ""]) -> MoESlots:
    at = number * BLOCK

    def put(all_keys: Array, keys: Array) -> Array:
        return jax.lax.dynamic_update_slice(all_keys, jnp.asarray(keys)[:, None], (0, i, 0, at, 0))

    slots = replace(
        slots,
        keys=put(slots.keys, block.keys),
        values=put(slots.values, block.values),
        tokens=jax.lax.dynamic_update_slice(slots.tokens, jnp.asarray(block.tokens)[None], (i, at)),
    )
    return constrain(SLOT_AXES, slots, RULES)


@partial(jax.jit, donate_argnums=0)
def _set_position(slots: MoESlots, i: int | Int[Array, ""], position: int | Int[Array, ""]) -> MoESlots:
    return constrain(SLOT_AXES, replace(slots, position=slots.position.at[i].set(position)), RULES)


@jax.jit
def _take(
    slots: MoESlots, i: int | Int[Array, ""], number: int | Int[Array, ""], n_read: int | Int[Array, ""]
) -> Block:
    """Copy one block out of a slot. Everything beyond `n_read` is zeroed, because it may belong to another user."""
    at = number * BLOCK
    mine = at + jnp.arange(BLOCK) < n_read

    def take(keys: Array) -> Array:
        n_layer, _, n_head, _, width = keys.shape
        block = jax.lax.dynamic_slice(keys, (0, i, 0, at, 0), (n_layer, 1, n_head, BLOCK, width))[:, 0]
        return jnp.where(mine[:, None], block, 0)

    tokens = jax.lax.dynamic_slice(slots.tokens, (i, at), (1, BLOCK))[0]
    block = Block(keys=take(slots.keys), values=take(slots.values), tokens=jnp.where(mine, tokens, 0))
    return constrain(BLOCK_AXES, block, RULES)
