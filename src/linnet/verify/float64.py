"""Evaluate a float32 program in float64, to distinguish rounding from errors.

The program is traced as it runs, in float32; then each of its operations is applied to float64 values. So its formulas, constants
and gradients are those of the float32 program, and no model needs a second code path. Constants that the program rounds to float32
before it uses them (tables, for instance) stay as rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives with an inner jaxpr that is evaluated inline, and the name of the parameter that holds it."""
SCATTER = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
BITWISE = ("random_bits", "bitcast_convert_type", "reduce_precision")
"""Primitives on the bits of a float32, which have no float64 equivalent."""


def evaluate_in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """Evaluate `function(*args)` with every float32 value as float64; returns numpy arrays."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    with jax.enable_x64(True):
        leaves = [_to_float64(jnp.asarray(leaf)) for leaf in jax.tree.leaves(args)]
        run = jax.jit(lambda consts, leaves: _evaluate(program.jaxpr, consts, leaves))
        values = run([_to_float64(jnp.asarray(const)) for const in program.consts], leaves)
        values = [np.asarray(value) for value in values]
    return jax.tree.unflatten(jax.tree.structure(shapes), values)


def _evaluate(program: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known = dict(zip((*program.constvars, *program.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return known[atom]
        shape: Any = atom.aval
        return _to_float64(jnp.asarray(atom.val, shape.dtype))

    for equation in program.eqns:
        values = _apply(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, map(_to_float64, values), strict=True))
    return [read(atom) for atom in program.outvars]


def _apply(equation: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    name, settings = equation.primitive.name, dict(equation.params)
    if name in INLINED:
        return _inner(settings[INLINED[name]], values)
    if name == "scan":
        return _scan(settings, values)
    if name == "scatter-add":  # its reduction is a jaxpr with a fixed dtype
        return [jax.lax.scatter_add(*values, **{key: settings[key] for key in SCATTER})]
    if name in BITWISE or any(
        isinstance(leaf, (Jaxpr, ClosedJaxpr)) for leaf in jax.tree.leaves(list(settings.values()))
    ):
        raise NotImplementedError(f"the operation {name!r} cannot be evaluated in float64")
    if name == "convert_element_type" and settings["new_dtype"] == jnp.float32:
        settings["new_dtype"] = np.dtype(np.float64)
    if settings.get("preferred_element_type") == jnp.float32:
        settings["preferred_element_type"] = np.dtype(np.float64)
    result = equation.primitive.bind(*values, **settings)
    return result if equation.primitive.multiple_results else [result]


def _inner(program: Any, values: Sequence[Any]) -> list[Any]:
    if isinstance(program, ClosedJaxpr):
        return _evaluate(program.jaxpr, [_to_float64(jnp.asarray(const)) for const in program.consts], values)
    return _evaluate(program, [], values)


def _scan(settings: dict[str, Any], values: list[Any]) -> list[Any]:
    n_const, n_carry = settings["num_consts"], settings["num_carry"]
    consts, carry, xs = values[:n_const], values[n_const : n_const + n_carry], values[n_const + n_carry :]

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _inner(settings["jaxpr"], [*consts, *carry, *x])
        return results[:n_carry], results[n_carry:]

    carry, ys = jax.lax.scan(body, carry, xs, length=settings["length"], reverse=settings["reverse"])
    return [*carry, *ys]


def _to_float64(value: Any) -> Any:
    return value.astype(jnp.float64) if value.dtype == jnp.float32 else value
