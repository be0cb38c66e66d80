"""Keys and values of `moe` sequences: slots on the device, and one sequence's as a value that grows by blocks.

Letters: L layers, B slots, H key heads, T tokens there is room for, K key width, S = BLOCK tokens.

A slot is written in place. Taken out, a sequence is a tuple of blocks: full blocks never change again, so the states of one
conversation, and of all that share a beginning, share them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from linnet.core.pytree import pytree, replace, static
from linnet.models.moe.config import MoEConfig
from linnet.models.moe.params import RULES
from linnet.models.tensor_parallel import decoding_rules
from linnet.parallel import sharding

BLOCK = 128
"""Keys that attention reads at once."""


@pytree
class Slots:
    keys: Float[Array, "L B H T K"]
    values: Float[Array, "L B H T K"]
    tokens: Int[Array, "B T"]  # what was read: padding is not looked at by what is read with it
    position: Int[Array, " B"]  # tokens read so far


@pytree
class Block:
    keys: Float[Array, "L H S K"]
    values: Float[Array, "L H S K"]
    tokens: Int[Array, " S"]


@pytree
class Memory:
    """Of one sequence. Beyond what was read, the last block is zeros: equal states are equal bits."""

    blocks: tuple[Block, ...]
    n_read: int = static(default=0)


def room(cfg: MoEConfig) -> int:
    """Whole blocks, and one more: what is written past the end of a chunk must not be moved back onto its beginning."""
    return (-(-cfg.context // BLOCK) + 1) * BLOCK


SLOT_NAMES: Any = Slots(
    keys=cast(Any, (None, None, "kv_heads", None, None)),
    values=cast(Any, (None, None, "kv_heads", None, None)),
    tokens=cast(Any, (None, None)),
    position=cast(Any, (None,)),
)
BLOCK_NAMES: Any = Block(
    keys=cast(Any, (None, "kv_heads", None, None)),
    values=cast(Any, (None, "kv_heads", None, None)),
    tokens=cast(Any, (None,)),
)
"""On a mesh each device has the keys and values of some heads."""


def _on_mesh(tree: Any, names: Any) -> Any:
    rules = decoding_rules(RULES)
    return jax.tree.map(lambda n, x: sharding.constrain(x, n, rules), names, tree, is_leaf=sharding.is_logical_axes)


def init_slots(cfg: MoEConfig, n: int) -> Slots:
    return _empty_slots(cfg, n) if sharding.current() is None else _slots_on_mesh(cfg, n)


@partial(jax.jit, static_argnames=("cfg", "n"))
def _slots_on_mesh(cfg: MoEConfig, n: int) -> Slots:
    return _on_mesh(_empty_slots(cfg, n), SLOT_NAMES)


def _empty_slots(cfg: MoEConfig, n: int) -> Slots:
    shape = (cfg.n_layer, n, cfg.n_kv_head, room(cfg), cfg.d_k)
    return Slots(
        keys=jnp.zeros(shape, cfg.dtype),
        values=jnp.zeros(shape, cfg.dtype),
        tokens=jnp.zeros((n, room(cfg)), jnp.int32),
        position=jnp.zeros((n,), jnp.int32),
    )


def insert(slots: Slots, one: Memory, i: int) -> Slots:
    """Puts a sequence into slot `i`, in place; the other slots are not touched."""
    for number, block in enumerate(one.blocks):
        slots = _put(slots, block, i, number)
    return _set_position(slots, i, one.n_read)


def alone(one: Memory, cfg: MoEConfig) -> Slots:
    """A slot that holds this sequence, and no other slot."""
    slots = init_slots(cfg, 1)
    if sharding.current() is None:
        # Placed as what programs return is: a sequence of no block would else be read by a program of its own.
        slots = jax.device_put(slots, jax.devices()[0])
    return insert(slots, one, 0)


def placed(one: Memory) -> Memory:
    """A state from elsewhere, where the programs have theirs."""
    return replace(one, blocks=tuple(_placed(block) for block in one.blocks))


@jax.jit
def _placed(block: Block) -> Block:
    return _on_mesh(block, BLOCK_NAMES)


def extract(slots: Slots, i: int, n_read: int, known: Memory | None = None) -> Memory:
    """The first `n_read` tokens of slot `i`. Blocks that are full in `known`, an earlier state of the same sequence, are shared."""
    n_known = 0 if known is None else min(known.n_read, n_read) // BLOCK
    shared = () if known is None else known.blocks[:n_known]
    fresh = tuple(_take(slots, i, number, n_read) for number in range(n_known, -(-n_read // BLOCK)))
    return Memory(blocks=shared + fresh, n_read=n_read)


def blank(cfg: MoEConfig, n_read: int) -> Memory:
    """Of the shapes that a sequence of so many tokens has."""

    def block() -> Block:
        empty = jnp.zeros((cfg.n_layer, cfg.n_kv_head, BLOCK, cfg.d_k), cfg.dtype)
        return Block(keys=empty, values=empty, tokens=jnp.zeros((BLOCK,), jnp.int32))

    return Memory(blocks=(jax.eval_shape(block),) * -(-n_read // BLOCK), n_read=n_read)


@partial(jax.jit, donate_argnums=0)
def _put(slots: Slots, block: Block, i: int | Int[Array, ""], number: int | Int[Array, ""]) -> Slots:
    at = number * BLOCK

    def put(all_keys: Array, keys: Array) -> Array:
        return jax.lax.dynamic_update_slice(all_keys, jnp.asarray(keys)[:, None], (0, i, 0, at, 0))

    slots = replace(
        slots,
        keys=put(slots.keys, block.keys),
        values=put(slots.values, block.values),
        tokens=jax.lax.dynamic_update_slice(slots.tokens, jnp.asarray(block.tokens)[None], (i, at)),
    )
    return _on_mesh(slots, SLOT_NAMES)


@partial(jax.jit, donate_argnums=0)
def _set_position(slots: Slots, i: int | Int[Array, ""], position: int | Int[Array, ""]) -> Slots:
    return _on_mesh(replace(slots, position=slots.position.at[i].set(position)), SLOT_NAMES)


@jax.jit
def _take(slots: Slots, i: int | Int[Array, ""], number: int | Int[Array, ""], n_read: int | Int[Array, ""]) -> Block:
    """What lies beyond `n_read` may be another user's: it is wiped."""
    at = number * BLOCK
    mine = at + jnp.arange(BLOCK) < n_read

    def take(keys: Array) -> Array:
        n_layer, _, n_head, _, width = keys.shape
        block = jax.lax.dynamic_slice(keys, (0, i, 0, at, 0), (n_layer, 1, n_head, BLOCK, width))[:, 0]
        return jnp.where(mine[:, None], block, 0)

    tokens = jax.lax.dynamic_slice(slots.tokens, (i, at), (1, BLOCK))[0]
    block = Block(keys=take(slots.keys), values=take(slots.values), tokens=jnp.where(mine, tokens, 0))
    return _on_mesh(block, BLOCK_NAMES)
