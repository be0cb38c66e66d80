"""Recompute training updates, the schedule and the nucleus filter of a Transformer-VQ reference file."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.config.schema import DataConfig, OptimConfig, RunConfig
from linnet.convert.transformer_vq_settings import GROUPED, OPTIM, optim_config, optim_values
from linnet.core.errors import UserError
from linnet.data.batch import Batch
from linnet.models import registry
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import TIED_BIAS, leaves_from_reference, reference_leaves, to_reference
from linnet.optim.optimizer import optimizer, schedule
from linnet.runs.state import TrainState, state_from_params
from linnet.train.step import make_step
from linnet.verify.golden import Golden
from linnet.verify.recomputed import Recomputed
from linnet.verify.vq.lion import LionCall, check_flips, observe_signs, run_call
from linnet.verify.vq.model import all_metrics, check_no_dropout, load_model, metric_scales, read_batch

MASKED = -1e10
OPTIM_SETTINGS = frozenset([*OPTIM, GROUPED])


def recompute_train(golden: Golden) -> Recomputed:
    """Run the trainer's own step, call by call. A call is one sequence: the state is carried within it, never between calls."""
    m = load_model(golden)
    check_no_dropout(golden, m.cfg)
    calls = sorted(int(c[1]) for name in golden.inputs if (c := re.fullmatch(r"batch(\d+)/inputs", name)))
    if not calls or calls != list(range(1, len(calls) + 1)):
        raise UserError(
            f"{golden.path} has the batches {calls}, but they must be numbered from 1 without a gap. Fix: write it again."
        )
    batches = {call: read_batch(golden, f"batch{call}/") for call in calls}
    rows, length = batches[1].inputs.shape
    cfg = RunConfig(
        model=m.cfg,
        data=DataConfig(sequence_len=length, update_len=golden.setting("update_len"), batch_size=rows),
        optim=read_optim_config(golden),
    )
    family = registry.get("vq")
    rule = optimizer(cfg.optim, family.param_specs(m.cfg))
    signed = cfg.optim.name == "lion"
    rule = observe_signs(rule, cfg.optim) if signed else rule
    state = state_from_params(family, cfg, rule, m.params, m.buffers)
    step = make_step(family, cfg, rule)
    values: dict[str, Any] = {}
    scales: dict[str, float] = {}
    lions: list[LionCall] = []
    for call, batch in batches.items():
        if batch.inputs.shape != (rows, length):
            raise UserError(f"{golden.path}: in/batch{call} must have the shape of in/batch1. Fix: write it again.")

        def one(state: TrainState, number: int, batch: Batch = batch) -> tuple[TrainState, dict[str, float]]:
            start = number * cfg.tokens.update_len
            buffers = jax.tree.map(jnp.copy, state.buffers)  # the step donates the state it is given
            state, metrics = step(state, batch.slice(start, start + cfg.tokens.update_len))
            return state, all_metrics(buffers, metrics, m.cfg)

        n_update = length // cfg.tokens.update_len
        if signed:
            done = run_call(cfg.optim, one, state, n_update, _expected_leaves(golden, call, m.cfg))
            state, per_update = done.state, done.metrics
            lions.append(done)
        else:
            per_update = []
            for number in range(n_update):
                state, metrics = one(state, number)
                per_update.append(metrics)
        values |= {f"metrics{call}/{name}": np.mean([update[name] for update in per_update]) for name in per_update[0]}
        after = to_reference(state.params, state.buffers, m.cfg)
        if not m.cfg.e_tie and TIED_BIAS in golden.params:
            after[TIED_BIAS] = _decay_unused(golden.params[TIED_BIAS], cfg.optim, call * n_update)
        values |= {f"after{call}/{name}": value for name, value in after.items()}
        scales |= metric_scales(golden, f"metrics{call}")
    return Recomputed(values=values, scales=scales, checks=[check_flips(lions)] if signed else [])


def _expected_leaves(golden: Golden, call: int, cfg: VQConfig) -> dict[str, np.ndarray]:
    """Return the reference's parameters after a call, by Linnet's leaf names; empty if the file lacks some."""
    after = {name: golden.outputs.get(f"after{call}/{name}") for name in reference_leaves(cfg)}
    present = {name: value for name, value in after.items() if value is not None}
    shapes = {name: golden.params[name].shape for name in present}
    if len(present) < len(after) or any(value.shape != shapes[name] for name, value in present.items()):
        return {}
    return leaves_from_reference(present, cfg)


def _decay_unused(bias: np.ndarray, optim: OptimConfig, n_update: int) -> np.ndarray:
    """Return a bias vector that an untied model has but never uses: only weight decay of vectors changes it."""
    value = np.asarray(bias, np.float32)
    for _ in range(n_update if optim.decay_vectors else 0):
        value = value - np.float32(optim.decay) * value
    return value


def read_optim_config(golden: Golden) -> OptimConfig:
    settings = golden.setting("opt")
    if not isinstance(settings, dict):
        raise UserError(f"{golden.path}: its config's 'opt' is not an object of settings. Fix: write it again.")
    unknown = sorted(set(settings) - OPTIM_SETTINGS)
    missing = sorted({"optimizer", "lr_max", "lr_schedule", "n_warmup_step", "n_max_step"} - set(settings))
    if unknown or missing:
        what = f"has {unknown[0]!r}, which is unknown" if unknown else f"lacks {missing[0]!r}"
        raise UserError(
            f"{golden.path}: its optimizer {what}. Its settings can be {', '.join(sorted(OPTIM_SETTINGS))}."
        )
    return optim_config({"clip": None, **optim_values({"opt": settings}, str(golden.path))}, str(golden.path))


def recompute_schedule(golden: Golden) -> Recomputed:
    steps = golden.get("out/steps")
    warmup_steps, max_steps = golden.setting("n_warmup_step"), golden.setting("n_max_step")
    values = {
        name: schedule(OptimConfig(schedule=name, warmup_steps=warmup_steps, steps=max_steps))(steps)
        for name in ("cosine", "linear", "constant")
    }
    skipped = {
        "steps": "an input: the steps at which the multipliers are computed",
        "inv_sqrt": "the reference's schedule grows without bound; Linnet's is an inverse square root",
    }
    return Recomputed(values=values, skipped=skipped)


def recompute_nucleus(golden: Golden) -> Recomputed:
    """Compare kept logits separately from the mask: next to -1e10 every error would look small."""
    from linnet.nn.sampling import nucleus

    values: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for name, want in golden.outputs.items():
        parts = re.fullmatch(r"(?:(\w+)_)?out_p([0-9.]+)", name)
        if parts is None:
            continue
        got = np.asarray(nucleus(jnp.asarray(golden.get(f"in/{parts[1] or 'logits'}")), float(parts[2])))
        kept = want > MASKED / 2
        values |= {f"{name}: mask": got > MASKED / 2, name: np.where(kept, got, 0.0)}
        expected |= {f"{name}: mask": kept, name: np.where(kept, want, 0.0)}
    return Recomputed(values=values, expected=expected)
