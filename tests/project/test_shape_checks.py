"""The test run checks the shapes that the package's signatures name."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import pytest
import shape_checks
from jaxtyping import TypeCheckError

from linnet.nn.norm import rms_norm
from linnet.nn.sampling import uniforms
from linnet.nn.vq_attention_scan import fold


def test_array_of_the_wrong_rank_is_an_error() -> None:
    count, total, codes = jnp.zeros((2, 3)), jnp.zeros((2, 3, 4)), jnp.zeros((2, 5), int)
    values, real = jnp.zeros((2, 5, 4)), jnp.ones((2, 5), bool)
    fold(count, total, codes, values, real)
    with pytest.raises(TypeCheckError, match="fold"):
        fold(count, total, codes, values[0], real)
    with pytest.raises(TypeCheckError, match="fold"):
        fold(count, total, codes, values[:, :4], real)


def test_wrong_dtype_is_an_error() -> None:
    rms_norm(jnp.zeros((2, 3)))
    with pytest.raises(TypeCheckError, match="rms_norm"):
        rms_norm(jnp.zeros((2, 3), int))


def test_one_key_is_not_a_batch_of_keys() -> None:
    import jax

    with pytest.raises(TypeCheckError, match="uniforms"):
        uniforms(jax.random.key(0), jnp.zeros((1,), int))


def test_checked_modules_exist_and_exceptions_are_of_the_package() -> None:
    modules = shape_checks.checked_modules()
    assert len(modules) > 100
    assert {"linnet.nn.moe", "linnet.models.vq.model", "linnet.optim.optimizer", "linnet.core.quant"} < set(modules)
    for name in shape_checks.UNCHECKED:
        _find(name)


def _find(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(_find(parent), last)
