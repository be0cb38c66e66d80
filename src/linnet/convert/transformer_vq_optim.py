"""Convert the optimizer state of an official Transformer-VQ checkpoint to Linnet's and back.

The official state is `multi_transform` of two groups. Codebooks are `sgd` without state. The others are a chain: clipping (if any),
the rule, the schedule's count, decay (if any). States in the chain are identified only by position, and the rule by the arrays it
stores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet.config.schema import OptimConfig, RunConfig
from linnet.convert.flax import flatten, nest
from linnet.core.params import is_spec
from linnet.core.pytree import named_leaves
from linnet.models import registry
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import (
    CODE_NAMES,
    TIED_BIAS,
    leaves_from_reference,
    leaves_to_reference,
    params_from_leaves,
    reference_leaves,
    unit_name,
)
from linnet.optim.optimizer import optimizer

Rule = Literal["adamw", "lion", "adafactor"]
MOMENTS: dict[Rule, tuple[str, ...]] = {"adamw": ("mu", "nu"), "lion": ("mu",), "adafactor": ("v_row", "v_col", "v")}
"""Arrays that each rule stores per parameter."""
N_STATES: dict[Rule, int] = {"adamw": 3, "lion": 3, "adafactor": 6}
"""Links of optax's own chain for the rule; only the first has a state."""
BETAS: dict[str, Any] = {"b1": 0.9, "b2": 0.98, "eps": 1e-9}


class UnsupportedOptimizer(ValueError):
    """The file has an optimizer state that Linnet cannot resume; the message gives the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfficialOptim:
    rule: Rule
    clips: bool
    decays: bool
    count: int
    """Updates so far: the position in the schedule."""
    kept: Mapping[str, Mapping[str, np.ndarray]]
    """`mu`, `nu`, .. by the reference's names."""

    @property
    def momentum_dtype(self) -> Literal["float32", "bfloat16"]:
        types = {array.dtype for array in self.kept["mu"].values()} if self.rule == "lion" else set()
        return "bfloat16" if types == {np.dtype(jnp.bfloat16)} else "float32"


def read_optimizer(opt_state: Mapping[str, Any]) -> OfficialOptim:
    """Parse an optimizer state; raises `UnsupportedOptimizer` if it is not the chain of the official code."""
    try:
        chain = opt_state["inner_states"]["main"]["inner_state"]
        links = [chain[str(i)] for i in range(len(chain))]
        at = next(i for i, link in enumerate(links) if isinstance(link.get("0"), dict))
        state, counted = links[at]["0"], links[at + 1]
    except (KeyError, TypeError, AttributeError, StopIteration, IndexError):
        raise UnsupportedOptimizer("it is not the chain of the official code") from None
    names = set(state) - {"count"}
    rule: Rule | None = next((rule for rule, kept in MOMENTS.items() if set(kept) == names), None)
    if rule is None:
        raise UnsupportedOptimizer(
            f"its optimizer stores {', '.join(sorted(names)) or 'nothing'}, which is neither adamw, lion nor adafactor"
        )
    if "count" not in state or not all(isinstance(state[name], dict) for name in MOMENTS[rule]):
        raise UnsupportedOptimizer("its optimizer state is incomplete")
    if at > 1 or any(links[:at]) or not isinstance(counted, dict) or set(counted) != {"count"}:
        raise UnsupportedOptimizer("its chain has transformations other than clipping, optimizer, schedule and decay")
    after = links[at + 2 :]
    if after and after != [{"inner_state": {}}]:
        raise UnsupportedOptimizer("its chain has transformations other than decay after the schedule")
    return OfficialOptim(
        rule=rule,
        clips=at == 1,
        decays=bool(after),
        count=_parse_count(counted["count"], state["count"]),
        kept={name: flatten(state[name]) for name in MOMENTS[rule]},
    )


def _parse_count(schedule: Any, rule: Any) -> int:
    counts = [np.asarray(count) for count in (schedule, rule)]
    if any(count.shape or count.dtype.kind not in "iu" or count < 0 for count in counts) or counts[0] != counts[1]:
        raise UnsupportedOptimizer("the step counts of its optimizer and its schedule differ")
    return int(counts[0])


def to_opt_state(found: OfficialOptim, cfg: RunConfig, params: Any) -> Any:
    """Return Linnet's state for `cfg.optim`, which must have the same rule."""
    specs = registry.get("vq").param_specs(cfg.model)
    fresh = jax.eval_shape(optimizer(cfg.optim, specs).init, params)
    leaves: dict[str, dict[str, np.ndarray]] = {}
    for name, arrays in found.kept.items():
        missing = sorted(set(reference_leaves(cfg.vq)) - set(arrays))
        if missing:
            raise UnsupportedOptimizer(f"its {name} has no {missing[0]}")
        try:
            leaves[name] = leaves_from_reference(arrays, cfg.vq)
        except ValueError:
            raise UnsupportedOptimizer(f"its {name} has other shapes in some layers than in others") from None
        bad = sorted(n for n, value in leaves[name].items() if not np.all(np.isfinite(np.asarray(value, np.float32))))
        if bad:
            raise UnsupportedOptimizer(f"its {name} of {bad[0]} is not finite")
    filled = _fill(fresh, leaves, jnp.asarray(found.count, jnp.int32), cfg.vq)
    for (name, old), (_, new) in zip(named_leaves(fresh), named_leaves(filled), strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise UnsupportedOptimizer(
                f"its {name} is {new.dtype}{list(new.shape)}, where {old.dtype}{list(old.shape)} is needed"
            )
    return filled


def _fill(state: Any, leaves: Mapping[str, Mapping[str, np.ndarray]], count: jax.Array, cfg: VQConfig) -> Any:
    """Return the same tree of states with the stored values."""
    if isinstance(state, optax.ScaleByScheduleState):
        return state._replace(count=count)
    if isinstance(state, optax.ScaleByAdamState):
        mu, nu = (params_from_leaves(leaves[name], cfg) for name in ("mu", "nu"))
        return state._replace(count=count, mu=mu, nu=nu)
    if isinstance(state, optax.ScaleByLionState):
        return state._replace(count=count, mu=params_from_leaves(leaves["mu"], cfg, leaves["mu"]["embed"].dtype))
    if isinstance(state, optax.FactoredState):
        kept: dict[str, Any] = {
            name: {leaf: jnp.asarray(leaves[name][leaf]) for leaf in getattr(state, name)}
            for name in MOMENTS["adafactor"]
        }
        return state._replace(count=jnp.broadcast_to(count, np.shape(state.count)), **kept)
    if isinstance(state, dict):
        return {name: _fill(part, leaves, count, cfg) for name, part in state.items()}
    if isinstance(state, tuple) and not hasattr(state, "_fields"):
        return tuple(_fill(part, leaves, count, cfg) for part in state)
    return state


# To the official code.


def from_opt_state(state: Any, optim: OptimConfig, cfg: VQConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the nested dict that the official code saves, and remarks about differences. `state` None: a fresh one."""
    remarks = _differences(optim)
    rule: Rule = "adamw" if optim.name == "muon" else optim.name
    if optim.name == "muon" or state is None:
        state = None
        remarks.append(f"The file contains a fresh optimizer state of {rule}.")
    found = {} if state is None else _collect_states(state)
    count = np.asarray(found["count"] if found else 0, np.int32)
    kept = {name: _reference_moments(name, rule, found.get(name), cfg) for name in MOMENTS[rule]}
    links: list[dict[str, Any]] = [{"count": count, **kept}, *({} for _ in range(N_STATES[rule] - 1))]
    chain: list[dict[str, Any]] = [{}] if optim.clip is not None else []
    chain += [_numbered(links), {"count": np.asarray(found.get("schedule", count), np.int32)}]
    chain += [{"inner_state": {}}] if optim.decay else []
    groups = {"main": chain, "codebook": [{}, {}]}
    return {"inner_states": {name: {"inner_state": _numbered(group)} for name, group in groups.items()}}, remarks


def _numbered(links: list[dict[str, Any]]) -> dict[str, Any]:
    return {str(i): link for i, link in enumerate(links)}


def _differences(optim: OptimConfig) -> list[str]:
    """Return what the official code would do differently when it resumes training."""
    differences = []
    if optim.name == "muon":
        differences.append("The official code has no muon.")
    if optim.decay and (optim.decay_by_lr or optim.decay_vectors):
        differences.append("The official code does not scale weight decay, and never applies it to vectors.")
    if optim.name == "adamw" and any(getattr(optim, name) != value for name, value in BETAS.items()):
        differences.append(
            f"The official code's adamw has b1 {BETAS['b1']}, b2 {BETAS['b2']} and eps {BETAS['eps']:g}."
        )
    if optim.name == "lion" and optim.momentum_dtype != "bfloat16":
        differences.append("The official code keeps lion's momentum in bfloat16: it is rounded in the file.")
    return differences


def _collect_states(state: Any) -> dict[str, Any]:
    """Return counts and the arrays of the rule by leaf name, with groups of stacked layers merged."""
    found: dict[str, Any] = {}

    def visit(part: Any) -> None:
        if isinstance(part, optax.ScaleByScheduleState):
            found["schedule"] = part.count
        elif isinstance(part, optax.ScaleByAdamState | optax.ScaleByLionState):
            names = ("mu", "nu") if isinstance(part, optax.ScaleByAdamState) else ("mu",)
            found.update({"count": part.count} | {name: dict(named_leaves(getattr(part, name))) for name in names})
        elif isinstance(part, optax.FactoredState):
            found["count"] = np.asarray(part.count).reshape(-1)[0]
            for name in MOMENTS["adafactor"]:
                found.setdefault(name, {}).update(getattr(part, name))
        elif isinstance(part, dict):
            for inner in part.values():
                visit(inner)
        elif isinstance(part, tuple) and not hasattr(part, "_fields"):
            for inner in part:
                visit(inner)

    visit(state)
    return found


def _reference_moments(name: str, rule: Rule, leaves: Mapping[str, Any] | None, cfg: VQConfig) -> dict[str, Any]:
    """Return the arrays by the reference's nested names; a codebook has an empty entry."""
    if leaves is None:
        leaves = _fresh_moments(name, rule, cfg)
    dtype = jnp.bfloat16 if rule == "lion" else np.float32
    flat: dict[str, Any] = {n: value.astype(dtype) for n, value in leaves_to_reference(leaves, cfg).items()}
    if TIED_BIAS not in flat:  # an untied model has it and never uses it
        flat[TIED_BIAS] = np.zeros(1 if name in ("v_row", "v_col") else cfg.n_vocab, dtype)
    codebooks = {f"{unit_name(i)}/{code}": {} for i in range(cfg.n_unit) for code in CODE_NAMES.values()}
    return nest(flat | codebooks)


def _fresh_moments(name: str, rule: Rule, cfg: VQConfig) -> dict[str, Any]:
    specs = registry.get("vq").param_specs(cfg)
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs, is_leaf=is_spec)
    return _collect_states(optimizer(OptimConfig(name=rule), specs).init(params))[name]
