"""Recompute results of a prior's reference file that need no network: tables, steps, positions and moving averages."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError
from linnet.core.files import parse_json
from linnet.models.prior import layers, schedule
from linnet.models.prior.solver import ddim_times
from linnet.models.prior.tokens import sinusoid
from linnet.nn.positions import interleaved_rope_frequencies
from linnet.optim import ema
from linnet.verify.golden import Golden
from linnet.verify.recomputed import Recomputed

P2_GAMMA = 0.5  # value used in the files that have such weights
TABLES = tuple(schedule.Tables.__dataclass_fields__)


def _schedules(golden: Golden) -> dict[str, schedule.Tables]:
    """Return the tables by the names of a file's groups: a schedule and its number of steps."""
    tables = {}
    for group in {name.split("/")[0] for name in golden.arrays}:
        parts = re.fullmatch(r"(cosine|linear|quadratic|sigmoid|jsd)_(\d+)", group)
        if parts is None:
            raise UserError(f"{golden.path}: {group!r} is not a schedule and a number of steps, as in 'cosine_1000'.")
        tables[group] = schedule.tables(parts[1], int(parts[2]))  # pyright: ignore[reportArgumentType]
    return tables


def recompute_noise_tables(golden: Golden) -> Recomputed:
    values: dict[str, Any] = {}
    for group, table in _schedules(golden).items():
        values |= {f"{group}/{name}": getattr(table, name) for name in TABLES}
        values[f"{group}/p2_loss_weight"] = schedule.p2_weights(table, P2_GAMMA)
    return Recomputed(values=values)


def recompute_noise_ops(golden: Golden) -> Recomputed:
    values: dict[str, Any] = {}
    inputs: set[str] = set()
    for group, table in _schedules(golden).items():
        names = [f"{group}/{name}" for name in ("t", "x0", "xt", "noise", "to_t")]
        t, x0, xt, noise, to = (jnp.asarray(golden.get(name)) for name in names)
        inputs |= set(names)
        results = {
            "q_sample": schedule.q_sample(table, x0, t, noise),
            "calculate_v": schedule.velocity(table, x0, t, noise),
            "predict_start_from_noise": schedule.start_from_noise(table, xt, t, noise),
            "predict_start_from_v": schedule.start_from_velocity(table, xt, t, noise),
            "predict_noise_from_start": schedule.noise_from_start(table, xt, t, x0),
            "q_posterior_mean": schedule.posterior_mean(table, x0, xt, t),
            "q_posterior_var": schedule.at(table.posterior_variance, t),
            "q_posterior_logvar": schedule.at(table.posterior_log_variance_clipped, t),
            "q_sample_from_to": schedule.q_sample_from_to(table, x0, t, to, noise),
            "p2_reweigh_loss": schedule.p2_weights(table, P2_GAMMA)[np.asarray(t)],
        }
        values |= {f"{group}/{name}": value for name, value in results.items()}
    return Recomputed(values=values, inputs=frozenset(inputs))


def recompute_ddim_times(golden: Golden) -> Recomputed:
    values = {}
    for name in golden.arrays:
        parts = re.fullmatch(r"T(\d+)_k(\d+)", name)
        if parts is not None:
            values[name] = ddim_times(int(parts[1]), int(parts[2]))
    return Recomputed(values=values)


def recompute_network_tables(golden: Golden) -> Recomputed:
    values: dict[str, Any] = {}
    inputs: set[str] = set()
    for name, want in golden.arrays.items():
        if parts := re.fullmatch(r"rotary(\d+)/(freqs|y)", name):
            width, name_x = int(parts[1]), f"rotary{parts[1]}/x"
            inputs.add(name_x)
            x = jnp.asarray(golden.get(name_x))
            values[name] = (
                interleaved_rope_frequencies(width) if parts[2] == "freqs" else layers.apply_partial_rope(x, 0, width)
            )
        if parts := re.fullmatch(r"rel_pos_bucket_(?:row(\d+)|last_row)", name):
            row = len(want) - 2 if parts[1] is None else int(parts[1])  # one key more than there are queries
            values[name] = layers.bucket(row - np.arange(len(want)))
        if name == "sinusoidal/y":
            inputs.add("sinusoidal/t")
            values[name] = sinusoid(jnp.asarray(golden.get("sinusoidal/t")), want.shape[-1])
    return Recomputed(values=values, inputs=frozenset(inputs))


def recompute_ema(golden: Golden) -> Recomputed:
    """Average a weight that is 1 at the first update, 2 at the second, and so on."""
    values: dict[str, Any] = {}
    for group in {name.split("/")[0] for name in golden.arrays}:
        cfg = ema.EmaConfig(**parse_json(str(golden.get(f"{group}/cfg")[()])))
        n = len(golden.get(f"{group}/ema_value"))

        def one(average: Any, step: Any, cfg: ema.EmaConfig = cfg) -> tuple[Any, tuple[Any, Any]]:
            average = ema.update(cfg, average, step + 1.0, step)
            return average, (average, ema.decay(cfg, step + 1))

        _, (average, decay) = jax.lax.scan(one, jnp.float32(0), jnp.arange(n))
        values |= {f"{group}/ema_value": average, f"{group}/decay": decay}
    return Recomputed(values=values)
