"""The optimiser's rules, and that stacking layers changes none of them."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config.schema import OptimConfig
from linnet.core.params import Spec
from linnet.optim.optimizer import optimizer, schedule

NAMES = ("adamw", "lion", "adafactor", "muon")
N_LAYER = 3
# 128 and more: adafactor factors such matrices only
SPECS: dict[str, Any] = {
    "matrix": Spec((N_LAYER, 130, 129), ("layers", "model", "heads")),
    "gain": Spec((N_LAYER, 6), ("layers", "model")),
    "embed": Spec((7, 6), ("vocab", "model")),
    "scale": Spec((), ()),
    "absent": None,
}


def config(**changes: Any) -> OptimConfig:
    values = {"lr": 0.01, "schedule": "constant", "warmup_steps": 0, "steps": 10, "clip": None, "decay": 0.0}
    return OptimConfig(**(values | changes))


def draw(specs: Any, seed: int) -> Any:
    generator = np.random.default_rng(seed)

    def one(spec: Spec) -> jax.Array:
        # Layers of very different sizes: statistics shared between them would show.
        sizes = 10.0 ** np.arange(spec.shape[0]).reshape(-1, *[1] * len(spec.layer_shape)) if spec.stack_shape else 1.0
        return jnp.asarray(generator.normal(size=spec.shape) * sizes, jnp.float32)

    return jax.tree.map(one, specs)


def run(cfg: OptimConfig, specs: Any, params: Any, gradients: list[Any]) -> Any:
    rule = optimizer(cfg, specs)
    state, update = rule.init(params), jax.jit(rule.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def layers(tree: Any) -> Any:
    """The same parameters as a reference without stacking has them: one entry per layer."""
    return {
        **{k: tree[k] for k in ("embed", "scale", "absent")},
        **{f"{k}{i}": tree[k][i] for k in ("matrix", "gain") for i in range(N_LAYER)},
    }


def layer_specs() -> Any:
    flat = {
        f"{k}{i}": Spec(SPECS[k].layer_shape, SPECS[k].axes[1:]) for k in ("matrix", "gain") for i in range(N_LAYER)
    }
    return {**{k: SPECS[k] for k in ("embed", "scale", "absent")}, **flat}


@pytest.mark.parametrize("name", NAMES)
def test_stacking_changes_nothing(name: str) -> None:
    cfg = config(name=name, clip=1.0, decay=0.01)
    params, gradients = draw(SPECS, 0), [draw(SPECS, 1), draw(SPECS, 2)]
    stacked = layers(run(cfg, SPECS, params, gradients))
    separate = run(cfg, layer_specs(), layers(params), [layers(g) for g in gradients])
    for key in separate:
        if separate[key] is not None:
            np.testing.assert_allclose(stacked[key], separate[key], rtol=3e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_arrays_and_none_stays_none(name: str) -> None:
    params = draw(SPECS, 0)
    rule = optimizer(config(name=name), SPECS)
    state = rule.init(params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    shapes = jax.eval_shape(rule.init, params)
    updates, after = cast(Any, rule.update(draw(SPECS, 1), state, params))
    assert jax.tree.structure(after) == jax.tree.structure(shapes) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(lambda x: x.shape, shapes)
    assert updates["absent"] is None
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_first_updates_equal_the_recorded_ones() -> None:
    """The first update of Adam and Lion is the gradient's sign; clipping by the norm of everything changes no sign."""
    params, gradient = draw(SPECS, 0), draw(SPECS, 1)
    for name in ("adamw", "lion"):
        after = run(config(name=name, clip=1.0), SPECS, params, [gradient])
        np.testing.assert_allclose(after["gain"], params["gain"] - 0.01 * np.sign(gradient["gain"]), rtol=1e-3)


def test_adafactor_scales_by_parameter() -> None:
    params, gradient = draw(SPECS, 0), draw(SPECS, 1)
    after = run(config(name="adafactor"), SPECS, params, [gradient])
    moved = after["matrix"] - params["matrix"]
    for i in range(N_LAYER):
        size = np.sqrt(np.mean(np.square(params["matrix"][i])))
        assert np.sqrt(np.mean(np.square(moved[i]))) == pytest.approx(0.01 * size, rel=0.05)


def test_muon_update_is_orthogonal_and_of_adams_size() -> None:
    params, gradient = draw(SPECS, 0), draw(SPECS, 1)
    moved = run(config(name="muon"), SPECS, params, [gradient])["matrix"] - params["matrix"]
    for i in range(N_LAYER):
        singular = np.linalg.svd(np.asarray(moved[i]), compute_uv=False)
        largest, middle = singular[0], singular[len(singular) // 2]
        assert 0.6 < middle / largest <= 1.0
        assert np.sqrt(np.mean(np.square(moved[i]))) == pytest.approx(0.01 * 0.2, rel=0.3)


def test_clipping_takes_the_norm_of_everything() -> None:
    specs = {"a": Spec((2,), (None,)), "b": Spec((2, 2), (None, None))}
    gradient = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0, 0.0], [0.0, 0.0]])}
    rule = optimizer(config(clip=0.5, name="lion"), specs)
    _, state = rule.update(gradient, rule.init(gradient), gradient)
    momentum = optax.tree.get(state, "mu")
    np.testing.assert_allclose(momentum["a"], 0.02 * 0.1 * gradient["a"], rtol=1e-5)
    np.testing.assert_allclose(momentum["b"], 0.02 * 0.1 * gradient["b"], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_decay_spares_vectors_and_ignores_rate_and_schedule(name: str) -> None:
    """At step 0 of a warm-up the multiplier is 0, so only decay moves anything."""
    params = draw(SPECS, 0)
    after = run(config(name=name, schedule="cosine", warmup_steps=5, decay=0.25), SPECS, params, [draw(SPECS, 1)])
    for key in ("matrix", "embed", "scale"):
        np.testing.assert_allclose(after[key], 0.75 * params[key], rtol=1e-6)
    np.testing.assert_array_equal(after["gain"], params["gain"])


def test_inverse_square_root() -> None:
    multiplier = schedule(OptimConfig(schedule="inv_sqrt", warmup_steps=4, steps=100, extra_steps=50))
    np.testing.assert_allclose(multiplier(jnp.array([0, 2, 4, 16, 64])), [0.0, 0.5, 1.0, 0.5, 0.25], rtol=1e-6)
    np.testing.assert_allclose(multiplier(jnp.array([100, 120, 150])), 0.2, rtol=1e-6)
    no_warmup = schedule(OptimConfig(schedule="inv_sqrt", warmup_steps=0, steps=100))
    np.testing.assert_allclose(no_warmup(jnp.array([0, 1, 4])), [1.0, 1.0, 0.5], rtol=1e-6)


@settings(deadline=None, max_examples=50)  # the first one compiles
@given(
    name=st.sampled_from(["cosine", "linear", "inv_sqrt", "constant"]),
    warmup=st.integers(0, 20),
    span=st.integers(1, 30),
)
def test_schedules_rise_to_one_then_never_rise(name: Any, warmup: int, span: int) -> None:
    cfg = OptimConfig(schedule=name, warmup_steps=warmup, steps=warmup + span, extra_steps=5)
    values = np.asarray(schedule(cfg)(jnp.arange(60)))
    assert values[warmup] == pytest.approx(1.0)
    np.testing.assert_allclose(values[:warmup], np.arange(warmup) / max(warmup, 1), rtol=1e-6)
    assert np.all(np.diff(values[warmup:]) <= 1e-7)
    np.testing.assert_array_equal(values[cfg.steps :], values[-1])
    if name in ("cosine", "linear"):
        assert values[-1] == pytest.approx(0.1, abs=1e-6)


def test_schedule_takes_one_step() -> None:
    assert float(schedule(OptimConfig(schedule="linear", warmup_steps=2, steps=10))(1)) == 0.5
