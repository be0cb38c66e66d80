"""Sampling: rows by their own plans in one batch, bit for bit as alone; solvers against an equation with a known answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_prior import config, inputs, prepared

from linnet.core.errors import UserError
from linnet.models.prior import schedule
from linnet.models.prior.sampling import best, run, sample, stack_solvers
from linnet.models.prior.solver import SolverTable, ddim_times, make_solver

WIDE = {"dim": 64, "n_head": 4, "d_head": 32, "ff_mult": 4}


def drawn(
    plans: list[SolverTable], guidance: list[float], which: list[int], cfg: Any, params: Any, *, guided: bool = True
) -> Any:
    """Rows `which` of a fixed set, in one batch."""
    given = inputs(cfg, 6)
    rows = jnp.asarray(which)
    keys = jax.vmap(jax.random.key)(rows)
    how = stack_solvers(plans, guidance, capacity=12)
    text, encodings = given["text"][rows], given["encodings"][rows]
    return run(params, text, encodings, how, keys, cfg=cfg, guided=guided, n_step=12)[0]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"self_cond": True, "n_image_token": 2}, marks=pytest.mark.trial)],
    ids=["plain", "self_cond"],
)
def test_row_is_batch_invariant_beside_other_solver_tables(options: dict[str, Any]) -> None:
    cfg = config(**WIDE, **options, timesteps=12)
    params = prepared(cfg)
    plans = [
        make_solver(cfg),
        make_solver(cfg, 5),
        make_solver(cfg, 7, "dpm"),
        make_solver(cfg, 9, eta=0.3),
        make_solver(cfg, 4),
    ]
    guidance = [1.0, 2.5, 1.0, 0.5, 3.0]
    together = drawn(plans, guidance, [0, 1, 2, 3, 4], cfg, params)
    assert len({float(x) for x in together[:, 0]}) == 5
    for i in range(5):
        alone = drawn(plans[i : i + 1], guidance[i : i + 1], [i], cfg, params)
        np.testing.assert_array_equal(alone[0], together[i])
    moved = drawn(plans[::-1], guidance[::-1], [4, 3, 2, 1, 0], cfg, params)
    np.testing.assert_array_equal(moved[::-1], together)


@pytest.mark.trial
def test_guidance_of_one_is_the_network_as_it_is_bit_for_bit() -> None:
    cfg = config(timesteps=12)
    params = prepared(cfg)
    plans, guidance = [make_solver(cfg, steps) for steps in (12, 5, 4, 7, 9)], [1.0, 1.0, 2.0, 1.0, 1.0]
    plain, guided = (drawn(plans, guidance, [0, 1, 2, 3, 4], cfg, params, guided=on) for on in (False, True))
    same = np.asarray([0, 1, 3, 4])
    np.testing.assert_array_equal(plain[same], guided[same])
    assert not np.allclose(plain[2], guided[2], rtol=1e-2)


def follow(plan: SolverTable, x: Any, start_at: Any) -> Any:
    """The sampler's own rule with a network that is known: `start_at(x, t)` is the predicted start."""
    before = np.zeros_like(x)
    for i in range(len(plan)):
        found = start_at(x, int(plan.times[i]))
        x = plan.keep[i] * x + plan.start[i] * found + plan.before[i] * before
        before = found
    return x


def test_dpm_solver_converges_at_second_order_where_ddim_does_at_first() -> None:
    """Starts that are normal with a spread of 0.5: the best prediction, and the way it leads, are known in closed form."""
    cfg = config(timesteps=4000, schedule="linear")
    kept = np.cumprod(1 - schedule.betas("linear", 4000))
    spread = 0.5

    def start_at(x: Any, t: int) -> Any:
        return np.sqrt(kept[t]) * spread**2 / (kept[t] * spread**2 + 1 - kept[t]) * x

    x = np.asarray([1.0, -0.7])
    errors = {}
    for solver in ("dpm", "ddim"):
        for steps in (20, 40, 80):
            plan = make_solver(cfg, steps, solver, eta=0.0)
            # The exact flow keeps x / sqrt(variance) until the last step, which both solvers end by the prediction itself.
            first, last = int(plan.times[0]), int(plan.times[-1])
            variance = kept * spread**2 + 1 - kept
            exact = start_at(x * np.sqrt(variance[last] / variance[first]), last)
            errors[solver, steps] = float(np.max(np.abs(follow(plan, x, start_at) - exact)))
    assert errors["dpm", 20] < 0.3 * errors["ddim", 20]
    for a, b in ((20, 40), (40, 80)):
        assert errors["dpm", a] / errors["dpm", b] > 3.0, errors
        assert errors["ddim", a] / errors["ddim", b] < 2.5, errors


def test_ddim_visits_the_references_times() -> None:
    assert ddim_times(20, 5).tolist() == [15, 11, 7, 3, -1]
    assert make_solver(config(timesteps=20), 5).times.tolist() == [15, 11, 7, 3]
    assert len(make_solver(config(timesteps=20))) == 20


def test_best_of_several_is_the_one_most_like_the_text_whatever_its_length() -> None:
    text = jnp.asarray([[1.0, 0.0], [0.0, 2.0]])
    candidates = jnp.asarray([[[9.0, 9.0], [0.1, 0.0]], [[0.0, 0.5], [5.0, 5.0]]])
    np.testing.assert_allclose(best(candidates, text), [[0.1, 0.0], [0.0, 0.5]])


def test_impossible_samples_are_rejected() -> None:
    cfg = config(p_drop_text=0.0, timesteps=12)
    given = inputs(cfg, 1)
    with pytest.raises(UserError, match="guidance"):
        sample(prepared(cfg), given["text"], None, make_solver(cfg, 4), jax.random.key(0)[None], cfg, guidance=2.0)
    for arguments in ((1,), (13,), (5, "ddpm"), (5, "ddim", 2.0)):
        with pytest.raises(UserError):
            make_solver(cfg, *arguments)  # pyright: ignore[reportArgumentType]
