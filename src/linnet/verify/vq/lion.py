"""Verify lion, which moves every parameter by the sign of an interpolated momentum.

If that momentum is zero within rounding, two correct programs may choose different signs and end up twice the learning rate apart.
Such flips are detected, counted and reproduced, so that everything after them is still compared at full tolerance. An element whose
momentum is not near zero is never treated as a flip.

A call of the reference makes several updates, and only the parameters after the last one are known. So a call is repeated: elements
that are off by exactly the effect of a changed sign, at an update where the sign is in doubt, get the other sign, until no further
difference is explained.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet.config.schema import OptimConfig
from linnet.core.pytree import named_leaves, replace
from linnet.optim.optimizer import LION_B1, schedule
from linnet.runs.state import TrainState
from linnet.verify.compare import Check

EXACT = 1e-5
"""Parameters agree within this, relative to the largest of their tensor; gradients are assumed to agree as well."""
ROUNDING = 2.0**-7
"""Momenta stored in bfloat16 may differ by one unit in their last place, relative to their size."""
MAX_FLIPPED = 0.01
"""Maximum fraction of signs that may flip. More than this is not rounding."""
MAX_ROUNDS = 10
SIGNS = (-1.0, 0.0, 1.0)

Leaves = dict[str, np.ndarray]
Forced = list[Leaves]
"""The sign to use for every update of a call and every leaf, or NaN for the program's own."""


class ObservedState(NamedTuple):
    """The optimizer state, and the momenta of the latest update."""

    state: Any
    interpolated: Any
    """The values whose signs were used."""
    momentum: Any


def observe_signs(rule: optax.GradientTransformation, cfg: OptimConfig) -> optax.GradientTransformation:
    """Wrap the trainer's own optimizer, to also return the values whose signs it uses."""
    clip = optax.identity() if cfg.clip is None else optax.clip_by_global_norm(cfg.clip)

    def init(params: Any) -> ObservedState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ObservedState(rule.init(params), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(gradient: Any, observed: ObservedState, params: Any = None) -> tuple[Any, ObservedState]:
        clipped, _ = clip.update(gradient, clip.init(params), params)
        states = observed.state
        lion = next(part for part in states if isinstance(part, optax.ScaleByLionState))
        momentum = jax.tree.map(lambda m: m.astype(jnp.float32), lion.mu)
        mixed = jax.tree.map(lambda g, m: (1 - LION_B1) * g + LION_B1 * m, clipped, lion.mu)
        updates, states = rule.update(gradient, states, params)
        return updates, ObservedState(states, mixed, momentum)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSigns:
    """One update: the signs used, and how far each parameter moved by its sign."""

    rate: float
    signs: Leaves
    """The signs used: the program's own, or forced."""
    in_doubt: dict[str, np.ndarray]
    changed: int
    """Number of forced signs that differ from the program's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionCall:
    state: TrainState
    metrics: list[dict[str, float]]
    """Of each update."""
    changed: int
    n_sign: int


RunUpdate = Callable[[TrainState, int], tuple[TrainState, dict[str, float]]]
"""One update of a call, by number."""


def run_call(
    cfg: OptimConfig, run: RunUpdate, state: TrainState, n_update: int, want: Mapping[str, np.ndarray]
) -> LionCall:
    """Repeat the call until no difference from `want` (leaves after it) is explained by a sign in doubt."""
    start = jax.device_get(state)
    shapes = {name: leaf.shape for name, leaf in named_leaves(start.params)}
    forced: Forced = [{name: np.full(shape, np.nan) for name, shape in shapes.items()} for _ in range(n_update)]
    state, metrics, seen = _run_once(cfg, run, start, forced)
    for _ in range(MAX_ROUNDS):
        if not _force_explained_signs(dict(named_leaves(state.params)), want, seen, forced):
            break
        state, metrics, seen = _run_once(cfg, run, start, forced)
    moving = sum(update.rate > 0 for update in seen)
    n_sign = moving * sum(int(np.prod(shape)) for shape in shapes.values())
    return LionCall(state=state, metrics=metrics, changed=sum(update.changed for update in seen), n_sign=n_sign)


def _run_once(
    cfg: OptimConfig, run: RunUpdate, start: TrainState, forced: Forced
) -> tuple[TrainState, list[dict[str, float]], list[UpdateSigns]]:
    state, metrics, seen = jax.tree.map(jnp.asarray, start), [], []
    for number, signs in enumerate(forced):
        rate = cfg.lr * float(schedule(cfg)(int(state.step)))
        state, values = run(state, number)
        seen.append(_inspect_signs(state.opt_state, rate, signs, cfg.momentum_dtype == "bfloat16"))
        state = replace(state, params=_apply_forced_signs(state.params, seen[-1], state.opt_state))
        metrics.append(values)
    return state, metrics, seen


def _inspect_signs(observed: ObservedState, rate: float, forced: Leaves, rounded: bool) -> UpdateSigns:
    signs, in_doubt, changed = {}, {}, 0
    momenta = dict(named_leaves(observed.momentum))
    for name, leaf in named_leaves(observed.interpolated):
        value, momentum = np.asarray(leaf, np.float64), np.abs(np.asarray(momenta[name], np.float64))
        largest = np.max(np.abs(value), axis=_tensor_axes(name, value), keepdims=True, initial=0.0)
        bound = EXACT * largest + (ROUNDING * LION_B1 * momentum if rounded else 0.0)
        in_doubt[name] = np.abs(value) <= bound
        own = np.sign(value)
        signs[name] = np.where(np.isnan(forced[name]), own, forced[name])
        changed += int(np.sum(signs[name] != own)) if rate > 0 else 0
    return UpdateSigns(rate=rate, signs=signs, in_doubt=in_doubt, changed=changed)


def _apply_forced_signs(params: Any, seen: UpdateSigns, observed: ObservedState) -> Any:
    """Return the parameters as if the forced signs had been used."""
    own = jax.tree.map(jnp.sign, observed.interpolated)

    def one(path: Any, param: Any, sign: Any) -> Any:
        name = "/".join(str(getattr(key, "name", key)) for key in path)
        return param - seen.rate * (jnp.asarray(seen.signs[name], param.dtype) - sign)

    return jax.tree_util.tree_map_with_path(one, params, own)


def _force_explained_signs(
    got: Mapping[str, Any], want: Mapping[str, np.ndarray], seen: list[UpdateSigns], forced: Forced
) -> bool:
    """Force the signs that explain a difference; returns False if there is nothing more to explain."""
    has_forced = False
    for name, expected in want.items():
        expected = np.asarray(expected, np.float64)
        off = expected - np.asarray(got[name], np.float64)
        allowed = EXACT * np.max(np.abs(expected), axis=_tensor_axes(name, expected), keepdims=True, initial=0.0)
        allowed = np.broadcast_to(allowed, off.shape)
        for at in zip(*np.nonzero(np.abs(off) > allowed), strict=True):
            signs = [float(update.signs[name][at]) for update in seen]
            best = _best_signs(float(off[at]), signs, seen, name, at)
            if best is None or best[0] > allowed[at]:
                continue
            has_forced = True
            for number, sign in best[1]:
                forced[number][name][at] = sign
    return has_forced


def _best_signs(
    off: float, signs: list[float], seen: list[UpdateSigns], name: str, at: tuple[Any, ...]
) -> tuple[float, tuple[tuple[int, float], ...]] | None:
    """Return the one or two changed signs that explain `off` best, and the remaining difference."""
    options = [
        (number, sign)
        for number, update in enumerate(seen)
        if update.rate > 0 and update.in_doubt[name][at]
        for sign in SIGNS
        if sign != signs[number]
    ]
    choices = [(option,) for option in options]
    choices += [pair for pair in itertools.combinations(options, 2) if pair[0][0] != pair[1][0]]
    left = [
        (abs(off + sum(seen[number].rate * (sign - signs[number]) for number, sign in choice)), choice)
        for choice in choices
    ]
    return min(left, default=None, key=lambda option: option[0])


def _tensor_axes(name: str, value: np.ndarray) -> tuple[int, ...]:
    """Return the axes of one tensor of the reference: a leaf of units has one tensor per unit."""
    return tuple(range(1 if name.startswith("units/") else 0, value.ndim))


def check_flips(calls: list[LionCall]) -> Check:
    changed, n_sign = sum(call.changed for call in calls), max(1, sum(call.n_sign for call in calls))
    share = changed / n_sign
    note = (
        f"{changed} of {n_sign} signs were set to the reference's, because their momentum is zero within rounding; everything else is "
        "compared with these signs"
    )
    if share > MAX_FLIPPED:
        note = f"{changed} of {n_sign} signs differ where the momentum is near zero: more than {MAX_FLIPPED:.0%} is not rounding"
    return Check("lion: signs in doubt", share, share <= MAX_FLIPPED, note, sign_flips=changed)
