"""The prior's own optimiser and moving average, by hand: what torch's AdamW and ema-pytorch do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet.config.schema import OptimConfig, TrainConfig
from linnet.core.errors import UserError
from linnet.core.params import Spec
from linnet.optim import ema
from linnet.optim.optimizer import optimizer, schedule


def test_decay_is_scaled_by_the_learning_rate_and_spares_vectors() -> None:
    specs = {
        "matrix": Spec((2, 3), (None, None)),
        "stack": Spec((2, 3), ("layers", None)),
        "vector": Spec((3,), (None,)),
    }
    params = {name: jnp.full(spec.shape, 2.0) for name, spec in specs.items()}
    cfg = OptimConfig(lr=0.1, decay=0.5, decay_by_lr=True, schedule="dampened_constant", warmup_steps=0, clip=None)
    rule = optimizer(cfg, specs)
    updates, _ = rule.update({name: jnp.zeros_like(p) for name, p in params.items()}, rule.init(params), params)
    after: Any = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after["matrix"], 2.0 - 0.1 * 0.5 * 2.0)
    np.testing.assert_array_equal(after["vector"], params["vector"])
    np.testing.assert_array_equal(after["stack"], params["stack"])  # a layer's vector is a vector


def test_rate_warms_up_and_follows_the_cosine() -> None:
    share = schedule(OptimConfig(schedule="dampened_cosine", warmup_steps=2, steps=3))
    np.testing.assert_allclose(share(np.arange(5)), [0.5, 0.75, 0.25, 0.0, 0.25], atol=1e-7)
    np.testing.assert_allclose(schedule(OptimConfig(schedule="dampened_constant", warmup_steps=0))(np.arange(3)), 1.0)


def test_ema_copies_then_starts_then_decays_ever_more_slowly() -> None:
    cfg = ema.EmaConfig(update_after_step=2, update_every=2, beta=0.6)
    average, seen = jnp.float32(-5), []
    for step in range(12):
        average = ema.update(cfg, average, jnp.float32(step), step)
        seen.append(float(average))
    assert seen[:6] == [0, 0, 2, 2, 4, 4]  # copies, the last of them where the average begins
    decay = 1 - (1 + 4) ** (-2 / 3)
    assert decay > 0.6  # so that beta caps it
    assert seen[6] == pytest.approx(4 * 0.6 + 6 * 0.4, rel=1e-6)
    assert seen[7] == seen[6]


def test_impossible_settings_are_rejected() -> None:
    for made in (
        lambda: ema.EmaConfig(beta=1.5),
        lambda: ema.EmaConfig(update_every=0),
        lambda: ema.EmaConfig(power=0.0),
        lambda: OptimConfig(b1=1.0),
        lambda: OptimConfig(b2=-0.1),
        lambda: OptimConfig(eps=0.0),
        lambda: TrainConfig(ema_power=0.5),
    ):
        with pytest.raises(UserError):
            made()
