"""Export a prior to DALLE2-pytorch: the state dict of a DiffusionPrior, and the checkpoint of its trainer.

The names, their order and the tables beside the weights are those of DALLE2-pytorch, so that its `load_state_dict(strict=True)` and
`DiffusionPriorTrainer.load` accept them. The version is written as text: torch loads the file with `weights_only=True`, and the
reference only prints the version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
import optax

from linnet.config.schema import OptimConfig, RunConfig
from linnet.convert.dalle2.prior import NETWORK, NOISE
from linnet.core.errors import UserError
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import BLOCK, ROTARY, to_reference
from linnet.models.prior.params import PriorParams
from linnet.models.prior.releases import NO_SELF_COND, behaviour, parse
from linnet.models.prior.schedule import tables
from linnet.optim.ema import begins, settings
from linnet.optim.optimizer import schedule
from linnet.runs.state import TrainState

ORDER = (
    "learned_query",
    "null_text_encodings",
    "null_text_embed",
    "null_text_embeds",
    "null_image_embed",
    "to_text_embeds.",
    "to_time_embeds.",
    "to_image_embeds.",
    BLOCK + "init_norm.",
    BLOCK + "rel_pos_bias.",
    BLOCK + "layers.",
    BLOCK + "norm.",
    BLOCK + "project_out.",
)
LAYER_ORDER = ("0.null_kv", "0.norm.", "0.to_q.", "0.to_kv.", "0." + ROTARY, "0.to_out.", "1.")
RELEASES = (
    "1.15.6",
    "1.12.0",
    "1.10.7",
    "1.10.3",
    "1.8.4",
    "1.6.1",
    "1.4.2",
    "0.23.2",
    "0.22.3",
    "0.22.1",
    "0.21.3",
    "0.21.0",
    "0.16.8",
    "0.16.1",
    "0.15.4",
)
"""The last release of each range that computes the same, newest first."""
BEHAVIOUR = {name for release in RELEASES for name in behaviour(release)}
NEEDED_FOR: dict[str, Callable[[PriorConfig], bool]] = {
    "truncated_time": lambda cfg: cfg.continuous_time,
    "self_cond_layout": lambda cfg: cfg.self_cond,
    "text_mask": lambda cfg: cfg.text_conditioning == "mask",
    "drop_text_embedding": lambda cfg: cfg.text_conditioning == "null_vectors",
}
"""Settings of a release that only affect some models."""


def find_release(cfg: PriorConfig) -> str:
    """Return the newest release whose network computes the same as this one."""
    return next((release for release in RELEASES if _computes(release, cfg)), None) or _no_release()


def _computes(release: str, cfg: PriorConfig) -> bool:
    settings = behaviour(release)
    if cfg.self_cond and parse(release) < parse(NO_SELF_COND):
        return False
    return all(
        getattr(cfg, name) == settings.get(name, field.default)
        for name, field in PriorConfig.__dataclass_fields__.items()
        if name in BEHAVIOUR and NEEDED_FOR.get(name, lambda _: True)(cfg)
    )


def _no_release() -> NoReturn:
    raise UserError(
        "no release of DALLE2-pytorch computes what this model computes, so it cannot be exported for it. "
        "Fix: use --format safetensors."
    )


def model_file(params: PriorParams, cfg: PriorConfig) -> dict[str, Any]:
    """Return what the reference's tracker saves as `model`."""
    release = find_release(cfg)
    return {"version": release, "model": state_dict(params, cfg, release)}


def state_dict(params: PriorParams, cfg: PriorConfig, release: str) -> dict[str, np.ndarray]:
    """Return the state dict of a DiffusionPrior: tables of the noise schedule, then the network in parameter order."""
    table = dataclasses.asdict(tables(cfg.schedule, cfg.timesteps))
    weights = rename_norms(to_reference(params, cfg), release)
    return {
        **{NOISE + name: np.ascontiguousarray(value) for name, value in table.items()},
        NOISE + "p2_loss_weight": np.ones(cfg.timesteps, np.float32),
        **{NETWORK + name: np.ascontiguousarray(weights[name]) for name in sorted(weights, key=_order_key)},
    }


def rename_norms(weights: dict[str, np.ndarray], release: str) -> dict[str, np.ndarray]:
    """Rename the norms for the release."""
    if parse(release) >= parse("0.16.0"):
        return weights
    found: dict[str, np.ndarray] = {}  # norms also had a shift, which was never trained
    for name, value in weights.items():
        if name.endswith(".g"):
            found[name.removesuffix("g") + "gamma"] = value
            found[name.removesuffix("g") + "beta"] = np.zeros_like(value)
        else:
            found[name] = value
    return found


def _order_key(name: str) -> tuple[Any, ...]:
    """Sort key for the definition order of the reference's modules. Submodules are already named in order."""
    first = next(
        i for i, prefix in enumerate(ORDER) if name == prefix or (prefix[-1] == "." and name.startswith(prefix))
    )
    if ORDER[first] != BLOCK + "layers.":
        return first, 0, 0, _name_key(name)
    layer, _, rest = name.removeprefix(BLOCK + "layers.").partition(".")
    part = next(i for i, prefix in enumerate(LAYER_ORDER) if rest.startswith(prefix))
    return first, int(layer), part, _name_key(rest)


def _name_key(name: str) -> tuple[Any, ...]:
    """Sort key: weights before biases, gains before shifts, numbers numerically."""
    ends = {"weight": "0", "bias": "1", "gamma": "0", "beta": "1"}
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, ends.get(part, part)) for part in name.split("."))


def trainer_file(
    state: TrainState, cfg: RunConfig, *, epoch: int, samples_seen: int, best_validation_loss: float
) -> dict[str, Any]:
    """Return what the reference's trainer saves, without the warm-up schedule (an object, which `load` does not read)."""
    check_optimizer(cfg.optim)
    release, step = find_release(cfg.prior), int(state.step)
    model = state_dict(state.params, cfg.prior, release)
    optimizer = _optimizer(state, cfg, model, release)
    saved: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": _scheduler(state, cfg, len(optimizer["param_groups"])),
        "warmup_scheduler": None,
        "model": model,
        "version": release,
        "step": np.array([step], np.int64),
        "epoch": epoch,
        "samples_seen": samples_seen,
        "best_validation_loss": best_validation_loss,
    }
    average = settings(cfg.train)
    if state.ema is None or average is None:
        return saved
    ema = state_dict(state.ema, cfg.prior, release)
    both = {
        f"{name}.{key}": value
        for name, part in (("online_model", model), ("ema_model", ema))
        for key, value in part.items()
    }
    initted = np.array(step > begins(average))
    return {**saved, "ema": {"initted": initted, "step": np.array(step, np.int64), **both}, "ema_model": ema}


def check_optimizer(optim: OptimConfig) -> None:
    """Raise if the optimizer state would have another meaning in the reference."""
    if optim.name != "adamw" or not optim.decay_by_lr or not optim.schedule.startswith("dampened"):
        raise UserError(
            "a trainer checkpoint needs a run that was trained as the reference trains: AdamW (--optim.name adamw), decay scaled by "
            "the learning rate (--optim.decay-by-lr) and a dampened schedule (--optim.schedule dampened_constant). "
            "Fix: export the weights alone (--format dalle2-prior, or best:model:PATH)."
        )


def parameter_groups(names: dict[str, np.ndarray], separate_vectors: bool) -> list[list[str]]:
    """Return names in the order of the reference's optimizer. With `separate_vectors`, vectors, which do
    not decay, are in a group of their own."""
    trained = [name for name in names if name.startswith(NETWORK) and not name.endswith(".beta")]
    rotary = [name for name in trained if name.endswith(ROTARY)]
    trained = [name for name in trained if name not in rotary[1:]]
    if not separate_vectors:
        return [trained]
    return [[n for n in trained if names[n].ndim >= 2], [n for n in trained if names[n].ndim < 2]]


def _optimizer(state: TrainState, cfg: RunConfig, model: dict[str, np.ndarray], release: str) -> dict[str, Any]:
    optim = cfg.optim
    adam = _find_state(state.opt_state, optax.ScaleByAdamState)
    mean, square = (state_dict(tree, cfg.prior, release) for tree in (adam.mu, adam.nu))
    groups = parameter_groups(model, optim.decay > 0 and not optim.decay_vectors)
    count = np.array(float(adam.count), np.float32)
    numbered = list(enumerate(name for group in groups for name in group))
    lr = optim.lr * float(schedule(optim)(int(adam.count)))
    options = {"lr": lr, "betas": (optim.b1, optim.b2), "eps": optim.eps, "amsgrad": False, "maximize": False}
    options |= {"foreach": None, "capturable": False, "differentiable": False, "fused": None, "initial_lr": optim.lr}
    described, at = [], 0
    for i, group in enumerate(groups):
        decay = 0.0 if i else optim.decay
        decoupled = {"decoupled_weight_decay": optim.decay > 0}
        described.append({**options, "weight_decay": decay, **decoupled, "params": list(range(at, at + len(group)))})
        at += len(group)
    return {
        "state": {
            i: {"step": count, "exp_avg": mean[name], "exp_avg_sq": square[name]}
            for i, name in numbered
            if not name.endswith(ROTARY)
        },
        "param_groups": described,
    }


def _scheduler(state: TrainState, cfg: RunConfig, n: int) -> dict[str, Any]:
    """Return the state of torch's CosineAnnealingLR or LambdaLR, whose rates exclude warm-up. `n`: number of parameter groups."""
    optim = cfg.optim
    count = int(_find_state(state.opt_state, optax.ScaleByAdamState).count)
    flat = dataclasses.replace(optim, warmup_steps=0)
    common = {
        "base_lrs": [optim.lr] * n,
        "last_epoch": count,
        "_step_count": count + 1,
        "_get_lr_called_within_step": False,
        "_last_lr": [optim.lr * float(schedule(flat)(count))] * n,
    }
    if optim.schedule == "dampened_cosine":
        return {**common, "T_max": optim.steps, "eta_min": 0}
    return {**common, "lr_lambdas": [None] * n}


def _find_state(opt_state: Any, kind: type) -> Any:
    return next(
        part for part in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)) if isinstance(part, kind)
    )
