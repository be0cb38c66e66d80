"""Memory estimates for serving: weights and slots per device, session state, and how many sessions fit. Computed from shapes only.

The batch is not sharded here: a mesh serves one replica; add replicas for a larger batch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast, get_args

import jax

from linnet.config.schema import RunConfig
from linnet.core import params
from linnet.core.dtypes import WeightDtype
from linnet.core.errors import invalid
from linnet.models import registry
from linnet.models.serving_memory import ServingMemory, serving_memory, shape_bytes
from linnet.models.tensor_parallel import check_serving
from linnet.parallel.mesh import n_devices, parse_mesh
from linnet.plan.formatting import format_bytes, mesh_title

SHORT_TEXT = 1024
"""Tokens of a short conversation, the second length at which a session state that grows with its text is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlan(ServingMemory):
    mesh: str
    n_device: int
    parameters: int
    weights: WeightDtype
    session_bytes: float
    """Bytes of one complete session state as saved or moved, at the longest context that the model allows."""
    short_session_bytes: float
    """The same after SHORT_TEXT tokens."""
    flops_per_token: int

    def n_slot(self, hbm: float) -> int:
        """Return the number of slots that fit in memory beside the weights, if nothing else uses it."""
        return max(0, math.floor((hbm - self.weight_bytes) / self.slot_bytes))


def plan_serving(cfg: RunConfig, weights: str) -> ServingPlan:
    if weights not in get_args(WeightDtype):
        raise invalid("--weights", weights, f"one of {', '.join(get_args(WeightDtype))}", "use bfloat16")
    sizes, dtype = parse_mesh(cfg.mesh), cast(WeightDtype, weights)
    check_serving(sizes, "--mesh", cfg.mesh)
    model, family = cfg.lm, registry.tokens(cfg.family)

    def session_bytes(n_read: int) -> float:
        return float(shape_bytes(jax.eval_shape(lambda: family.decoder.abstract_state(model, n_read))))

    return ServingPlan(
        **dataclasses.asdict(serving_memory(family, model, sizes, dtype)),
        mesh=cfg.mesh,
        n_device=n_devices(sizes),
        parameters=params.count(family.param_specs(model)),
        weights=dtype,
        session_bytes=session_bytes(model.context or SHORT_TEXT),
        short_session_bytes=session_bytes(SHORT_TEXT),
        flops_per_token=family.flops_per_token(model),
    )


def format_serving(plan: ServingPlan, n_slot: int, hbm: float) -> str:
    slots = plan.slot_bytes * n_slot
    total = plan.weight_bytes + slots
    lines = [
        f"Serving on {mesh_title(plan.mesh)}: {plan.n_device} devices, {plan.weights} weights, {n_slot} slots.",
        "",
        "Memory per device:",
        f"  weights              {format_bytes(plan.weight_bytes):>9}",
        f"  {n_slot:4} slots           {format_bytes(slots):>9}",
        f"  total                {format_bytes(total):>9}",
        "",
        f"{'It fits' if total <= hbm else 'It does not fit'} in {format_bytes(hbm)}, which has room for {plan.n_slot(hbm):,} slots "
        "beside the weights.",
        f"Session state: {format_bytes(plan.session_bytes)}; after {SHORT_TEXT:,} tokens {format_bytes(plan.short_session_bytes)}.",
        f"FLOPs per token: {plan.flops_per_token:.4g}.",
    ]
    return "\n".join(lines)
