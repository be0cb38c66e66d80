"""Memory estimates for serving: weights and slots per device, session state, and how many sessions fit. Computed from shapes only.

The batch is not sharded here: a mesh serves one replica; add replicas for a larger batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, AxisType

from linnet.config.schema import RunConfig
from linnet.core import params
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.models import registry
from linnet.models.tensor_parallel import check_serving, decoding_rules
from linnet.models.vq.config import VQConfig
from linnet.parallel import sharding
from linnet.parallel.mesh import MESH_AXES, n_devices, parse_mesh
from linnet.plan.sizes import in_words

SHORT_TEXT = 1024
"""Tokens of a short conversation, the second length at which a session state that grows with its text is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    mesh: str
    n_device: int
    parameters: int
    weights: WeightDtype
    weight_bytes: float
    """Per device, including the weights prepared for decoding."""
    read_bytes: float
    """The part of `weight_bytes` that is read for each token."""
    slot_bytes: float
    """Bytes of one slot per device."""
    session_bytes: float
    """Bytes of one complete session state as saved or moved, at the longest context that the model allows."""
    short_session_bytes: float
    """The same after SHORT_TEXT tokens."""
    flops_per_token: int

    def n_slot(self, hbm: float) -> int:
        """Return the number of slots that fit in memory beside the weights, if nothing else uses it."""
        return max(0, math.floor((hbm - self.weight_bytes) / self.slot_bytes))


def plan_serving(cfg: RunConfig, weights: str) -> Serving:
    if weights not in get_args(WeightDtype):
        raise invalid("--weights", weights, f"one of {', '.join(get_args(WeightDtype))}", "use bfloat16")
    sizes = parse_mesh(cfg.mesh)
    check_serving(sizes, "--mesh", cfg.mesh)
    model, family = cfg.writer, registry.tokens(cfg.family)
    mesh: Any = AbstractMesh(
        tuple(sizes[name] for name in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )
    specs = family.param_specs(model)
    held: Any = weights
    placed = sharding.abstract_weights(specs, mesh, held, decoding_rules(family.RULES), n_group=sizes["model"])
    mine, whole = sharding.bytes_per_device(placed), _bytes(placed)
    read = float(mine)
    if isinstance(model, VQConfig):  # decoding keeps a second copy of the weights in its own layout
        buffers = params.abstract(family.buffer_specs(model))
        ahead = jax.eval_shape(lambda p, b: family.decoder.prepare(p, b, model), placed, buffers)
        read = _bytes(ahead) * mine / whole
        mine += read
    return Serving(
        mesh=cfg.mesh,
        n_device=n_devices(sizes),
        parameters=params.count(specs),
        weights=held,
        weight_bytes=mine,
        read_bytes=read,
        slot_bytes=_slot_bytes(model, family, sizes["model"]),
        session_bytes=_session_bytes(model, family, None),
        short_session_bytes=_session_bytes(model, family, SHORT_TEXT),
        flops_per_token=family.flops_per_token(model),
    )


def _slot_bytes(model: Any, family: Any, n_part: int) -> float:
    """Return the bytes per slot and device. The model axis shards the heads (vq with one head: the values); the rest is replicated."""
    slots = jax.eval_shape(lambda: family.decoder.init_slots(model, 1))
    if isinstance(model, VQConfig):
        cut = _bytes(slots.units if model.n_head > 1 else [unit.total for unit in slots.units])
    else:
        cut = _bytes((slots.keys, slots.values))
    return cut / n_part + _bytes(slots) - cut


def _session_bytes(model: Any, family: Any, n_read: int | None) -> float:
    length = n_read if n_read is not None else model.context or SHORT_TEXT
    return float(_bytes(jax.eval_shape(lambda: family.decoder.abstract_state(model, length))))


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def in_full(plan: Serving, n_slot: int, hbm: float) -> str:
    slots = plan.slot_bytes * n_slot
    total = plan.weight_bytes + slots
    fits = "It fits" if total <= hbm else "It does not fit"
    lines = [
        f"Serving on mesh {plan.mesh or 'of one device'}: {plan.n_device} devices, weights in {plan.weights}, {n_slot} slots.",
        "",
        "Bytes on each device:",
        f"  weights              {in_words(plan.weight_bytes):>9}",
        f"  {n_slot:4} slots           {in_words(slots):>9}",
        f"  in all               {in_words(total):>9}",
        "",
        f"{fits} in {in_words(hbm)}, which holds {plan.n_slot(hbm):,} slots beside the weights.",
        f"A session's state is {in_words(plan.session_bytes)}; after {SHORT_TEXT:,} tokens {in_words(plan.short_session_bytes)}.",
        f"FLOPs a token: {plan.flops_per_token:.4g}.",
    ]
    return "\n".join(lines)
