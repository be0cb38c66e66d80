"""The prior's network: text read once is the whole network, wherever the batch is cut; settings that cannot be are rejected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_prior import config, inputs, model

from linnet.core.errors import UserError
from linnet.core.params import is_spec
from linnet.core.pytree import named_leaves, replace
from linnet.models.prior.convert import from_reference, to_reference
from linnet.models.prior.diffusion import Draws, draw, loss, row_errors, row_losses
from linnet.models.prior.network import denoise, network, read_text
from linnet.models.prior.params import param_specs
from linnet.models.prior.releases import behaviour
from linnet.models.prior.schedule import min_snr_weights, tables
from linnet.models.prior.tokens import padding_of

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "n_time_token": 2,
        "n_image_token": 3,
        "n_text_token": 2,
        "self_cond": True,
        "normformer": True,
        "norm_in": True,
    },
    "continuous_bare": {"continuous_time": True, "norm_out": False, "final_proj": False, "rotary": False},
    "narrow_text": {"text_dim": 10},
    "one_layer": {"depth": 1, "max_text_len": 0, "text_encodings": False},
    **{release: {**behaviour(release), "norm_in": True, "normformer": True} for release in ("0.15.4", "0.22.3")},
    "0.16.1": {**behaviour("0.16.1"), "continuous_time": True},
    "0.23.2": {**behaviour("0.23.2"), "continuous_time": True},
    "1.4.2": behaviour("1.4.2"),
    "1.8.4": {**behaviour("1.8.4"), "self_cond": True, "n_image_token": 2},
    "1.10.3": {**behaviour("1.10.3"), "self_cond": True, "continuous_time": True},
}
QUICK = ("all", "0.22.3")  # `make trials` takes the rest
drawn = jax.jit(draw, static_argnums=(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param(o, id=n, marks=[pytest.mark.trial] if n not in QUICK else []) for n, o in OPTIONS.items()]
)
def test_cached_text_equals_the_full_network(options: dict[str, Any]) -> None:
    cfg = config(**options)
    params, given = model(cfg), inputs(cfg, 4)
    keep_text, keep_image = jnp.asarray([True, False, True, False]), jnp.asarray([True, True, False, False])
    known = given["image"][::-1] if cfg.self_cond else None
    encodings = given["encodings"] if cfg.text_encodings else None

    @jax.jit
    def both(params: Any, image: Any, text: Any, encodings: Any) -> tuple[Any, Any]:
        padding = padding_of(encodings, cfg)
        complete = network(
            params, image, given["times"], text, encodings, keep_text, keep_image, known, cfg, padding=padding
        )
        memory = read_text(params, text, encodings, keep_text, cfg, padding=padding)
        return complete, denoise(params, memory, image, given["times"], keep_image, known, cfg)

    complete, split = both(params, given["image"], given["text"], encodings)
    assert float(jnp.std(complete)) > 0.01
    np.testing.assert_allclose(split, complete, rtol=2e-5, atol=2e-5 * float(jnp.max(jnp.abs(complete))))


@pytest.mark.parametrize("release", ["0.15.4", pytest.param("0.22.3", marks=pytest.mark.trial)])
def test_room_for_more_encodings_changes_nothing(release: str) -> None:
    """A text keeps its positions in a memory that has room for longer ones."""
    cfg = config(**behaviour(release), n_text_token=2)
    params, given = model(cfg), inputs(cfg, 2)
    encodings, text, image = given["encodings"][:, :3], given["text"], given["image"]
    roomy = jnp.zeros_like(given["encodings"]).at[:, :3].set(encodings)

    @jax.jit
    def both(params: Any) -> tuple[Any, Any]:
        complete = network(params, image, given["times"], text, encodings, None, None, None, cfg)
        memory = read_text(
            params, text, roomy, None, cfg, padding=padding_of(roomy, cfg), n_encodings=jnp.full((2,), 3)
        )
        return complete, denoise(params, memory, image, given["times"], None, None, cfg)

    complete, split = both(params)
    assert float(jnp.std(complete)) > 0.01
    np.testing.assert_allclose(split, complete, atol=2e-5 * float(jnp.max(jnp.abs(complete))))


def test_dropped_conditions_do_not_reach_the_prediction_and_kept_ones_do() -> None:
    cfg = config()
    params, given = model(cfg), inputs(cfg, 2)
    off, on = jnp.zeros(2, bool), jnp.ones(2, bool)

    @jax.jit
    def predict(image: Any, text: Any, encodings: Any, keep_text: Any, keep_image: Any) -> Any:
        return network(params, image, given["times"], text, encodings, keep_text, keep_image, None, cfg)

    known = (given["image"], given["text"], given["encodings"])
    other = tuple(jnp.flip(x, axis=-1) for x in known)
    np.testing.assert_array_equal(predict(*known, off, off), predict(*other, off, off))
    for i, keep in enumerate(((off, on), (on, off), (on, off))):
        changed = (*known[:i], other[i], *known[i + 1 :])
        assert float(jnp.max(jnp.abs(predict(*known, *keep) - predict(*changed, *keep)))) > 1e-3


def test_row_samples_by_its_index_so_that_micro_batches_change_nothing() -> None:
    cfg = config(depth=1, p_drop_attention=0.2, p_drop_ff=0.2, p_drop_text=0.5, p_drop_image=0.5)
    key, params, given = jax.random.key(3), model(cfg), inputs(cfg, 6)
    first, later = drawn(key, 0, 4, cfg), drawn(key, 2, 4, cfg)  # rows 0 to 3, and 2 to 5
    for (name, a), (_, b) in zip(named_leaves(first), named_leaves(later), strict=True):
        assert jnp.array_equal(a[2:], b[:2]), name
        assert not jnp.array_equal(a, b), name

    @jax.jit
    def losses(draws: Draws, image: Any, text: Any, encodings: Any) -> Any:
        return row_losses(params, image, text, encodings, draws, cfg)

    here, there = ([given[name][cut] for name in ("image", "text", "encodings")] for cut in (slice(4), slice(2, 6)))
    found = losses(first, *here)
    np.testing.assert_allclose(found[2:], losses(later, *there)[:2], rtol=1e-5)
    other = losses(replace(first, dropout=drawn(jax.random.key(4), 0, 4, cfg).dropout), *here)
    assert not np.allclose(other, found, rtol=1e-3)  # dropout is there


@pytest.mark.trial
def test_bfloat16_is_near_and_its_gradients_are_finite() -> None:
    given, draws, params = inputs(config(), 4), drawn(jax.random.key(0), 0, 4, config()), model(config())

    def value(params: Any, cfg: Any) -> Any:
        return loss(params, given["image"], given["text"], given["encodings"], draws, cfg)

    exact = jax.jit(value, static_argnums=1)(params, config())
    near, gradient = jax.jit(jax.value_and_grad(value), static_argnums=1)(params, config(dtype="bfloat16"))
    assert 0 < abs(near / exact - 1) < 0.03
    assert all(bool(np.all(np.isfinite(g))) for g in jax.tree.leaves(gradient))


def test_min_snr_weighs_every_objective_as_an_error_of_the_start() -> None:
    table = tables("cosine", 100)
    ratio = table.alphas_cumprod / (1 - table.alphas_cumprod)
    np.testing.assert_allclose(min_snr_weights(table, 5.0, "x_start"), np.minimum(ratio, 5), rtol=1e-4)
    noise, v = min_snr_weights(table, 5.0, "noise"), min_snr_weights(table, 5.0, "v")
    np.testing.assert_allclose(noise, np.minimum(1, 5 / ratio), rtol=1e-4)
    np.testing.assert_allclose(v, np.minimum(ratio, 5) / (ratio + 1), rtol=1e-4)
    cfg, given = config(), inputs(config(), 4)
    draws: Any = Draws(**{**dict.fromkeys(Draws.__dataclass_fields__), "times": given["times"]})
    plain, weighed = (
        row_errors(given["text"], given["image"], draws, replace(cfg, min_snr_gamma=gamma)) for gamma in (None, 5.0)
    )
    np.testing.assert_allclose(
        weighed / plain, min_snr_weights(tables("cosine", 40), 5.0, "x_start")[draws.times], rtol=1e-5
    )


def test_weights_go_to_the_references_names_and_back() -> None:
    for options in (OPTIONS["all"], OPTIONS["continuous_bare"], {}):
        cfg = config(**options)
        params = model(cfg)
        back = from_reference(to_reference(params, cfg), cfg)
        for (name, a), (_, b) in zip(named_leaves(params), named_leaves(back), strict=True):
            assert np.array_equal(a, b), name
    state = to_reference(model(config()), config())
    with pytest.raises(UserError, match="no 'learned_query'"):
        from_reference({k: v for k, v in state.items() if k != "learned_query"}, config())
    with pytest.raises(UserError, match="'extra'"):
        from_reference({**state, "extra": np.zeros(3)}, config())
    with pytest.raises(UserError, match="shape"):
        from_reference(state, config(d_head=4))


def test_parameters_with_two_dimensions_in_the_reference_decay() -> None:
    cfg = config(**OPTIONS["all"])
    state = to_reference(model(cfg), cfg)
    from linnet.models.prior.convert import NAMES

    for name, spec in named_leaves(param_specs(cfg), is_leaf=is_spec):
        assert (len(spec.layer_shape) == 1) == (state[NAMES[name].format(i=0)].ndim == 1), name


@pytest.mark.parametrize(
    "changes",
    [
        {"dim": 0},
        {"d_head": 7},
        {"p_drop_text": 1.5},
        {"min_snr_gamma": 0.0},
        {"image_embed_scale": -1.0},
        {"max_text_len": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"model.{next(iter(changes))}"):
        config(**changes)


def test_config_is_hashable_and_says_whether_it_can_guide() -> None:
    assert len({config(), config()}) == 1
    assert config().can_guide
    assert not any(cfg.can_guide for cfg in (config(p_drop_image=0.0), config(**behaviour("1.6.0"))))
    assert config(**behaviour("0.20.1"), p_drop_image=0.0).can_guide  # that release drops only the text
