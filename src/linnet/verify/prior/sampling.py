"""Recompute sampling (with the recorded noise) and complete training updates of a prior's reference file."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet.config.schema import OptimConfig
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import to_reference
from linnet.models.prior.diffusion import Draws, loss
from linnet.models.prior.params import PriorParams, param_specs
from linnet.models.prior.sampling import best, prepare, run, stack_solvers
from linnet.models.prior.solver import SolverTable, make_solver
from linnet.optim import ema
from linnet.optim.optimizer import optimizer, schedule
from linnet.verify.golden import Golden
from linnet.verify.prior.model import load_model, settings_group
from linnet.verify.recomputed import Recomputed

# Suffixes of the names of runs, and the settings they change.
RUNS: dict[str, dict[str, Any]] = {
    "": {},
    "init": {"normalize_start": True},
    "final": {"normalize_final": True},
    "allclamp": {"normalize_start": True, "normalize_steps": True, "normalize_final": True},
    "selfcond": {"self_cond": True},
    "continuous": {"continuous_time": True},
}
SAMPLER = re.compile(r"(ddpm|ddim(\d+)_eta([0-9.]+))(?:_cs([0-9.]+))?")
SAMPLE_STEPS = 10  # for files that do not state it
TARGET = re.compile(r"(x_start|noise|v)(?:_(\w+))?")
# A network that predicts noise gives x_start only as R x - M output (M is 6.4 at the first of 10 steps), a difference of large numbers
# that is then clipped to 1: the float32 error is small relative to the operands, not relative to the clipped result. So these results
# are compared relative to the initial noise, 2.27 times as large in the reference's file. Measured there by computing the five DDIM
# runs without encodings in float64, from the same tables, relative to the largest result: the reference's own float32 is 4.4e-6 to
# 1.4e-5 away, ours 1.3e-6 to 8.5e-6, and the two up to 1.6e-5 apart. An error of 4e-7 in the network's output, which is its round-off,
# has the same effect in the float64 run (5.6e-6, at most 1.2e-5). Over 24 other texts ours is off by 2.4e-6 in the median and 2.9e-5
# at most, numpy's float32 by 2.0e-6 and 1.3e-5. If x_start or the velocity is predicted, reference and ours stay within 8.1e-7, and
# the tolerance is not loosened.
AGAINST_NOISE = "runs that predict noise: errors of their results are relative to the noise they began with"


def recompute_sampling(golden: Golden) -> Recomputed:
    settings, steps = settings_group(golden, "network"), golden.settings["timesteps"]
    drop = golden.settings.get("cond_drop_prob", 0.0)
    text, encodings, noise = (jnp.asarray(golden.get(f"in/{n}")) for n in ("text_embed", "text_encodings", "noise"))
    models: dict[str, tuple[PriorConfig, PriorParams]] = {}
    values: dict[str, Any] = {}
    scales: dict[str, float] = {}

    def model(target: str, option: str) -> tuple[PriorConfig, PriorParams]:
        if f"{target}/{option}" not in models:
            changes: dict[str, Any] = dict(RUNS.get(option, {}))
            if option == "clamp":
                changes = {"normalize_steps": True} if target == "x_start" else {"clip_start": True}
            if target == "noise":
                changes["clip_start"] = True  # the reference always does
            weights = f"sd_{option}/" if golden.below(f"sd_{option}/") else "params/"
            own = {**settings, "num_timesteps": None} if changes.pop("continuous_time", False) else settings
            cfg, params = load_model(
                golden, own, weights, timesteps=steps, objective=target, p_drop_text=drop, p_drop_image=drop, **changes
            )
            models[f"{target}/{option}"] = cfg, prepare(params, cfg)
        return models[f"{target}/{option}"]

    # Runs of one model are rows of one batch, each with its own solver.
    batches: dict[tuple[str, str, str], list[tuple[str, int | None, float, float]]] = {}
    for name in golden.below("out/"):
        sampler, _, rest = name.partition("/")
        how, what = SAMPLER.fullmatch(sampler), TARGET.fullmatch(rest.partition("/")[0])
        if how is None or what is None or (what[2] or "") not in (*RUNS, "clamp"):
            continue
        one = (name, int(how[2]) if how[2] else None, float(how[3] or 1.0), float(how[4] or 1.0))
        batches.setdefault((what[1], what[2] or "", rest.rpartition("/")[2]), []).append(one)
    n = len(text)
    for (target, option, encoding), runs in batches.items():
        cfg, params = model(target, option)
        solvers = [make_solver(cfg, n_step, eta=eta) for _, n_step, eta, _ in runs]
        wide_text, wide_noise = jnp.tile(text, (len(runs), 1)), jnp.tile(noise, (1, len(runs), 1))
        wide_encodings = None if encoding == "noenc" else jnp.tile(encodings, (len(runs), 1, 1))
        result, path = _run(params, cfg, solvers, [r[3] for r in runs], wide_text, wide_encodings, wide_noise)
        for i, ((name, n_step, _, _), solver) in enumerate(zip(runs, solvers, strict=True)):
            rows = slice(i * n, (i + 1) * n)
            values[f"out/{name}"] = result[rows]
            if target == "noise":
                scales[f"out/{name}"] = float(jnp.max(jnp.abs(noise[0]))) / cfg.scale
            values[f"out/times/{name}"] = solver.times
            values[f"out/xt/{name}"] = path[: len(solver), rows]
            # Noise is drawn to start from, then at every DDPM step (the last is not used), or for every DDIM step that ends above t =
            # 0.
            values[f"out/n_noise/{name}"] = 1 + (len(solver) if n_step is None else np.sum(solver.times[1:] > 0))
    inputs = {f"out/sample/{name}" for name in ("text", "text_embed", "text_encodings", "noise")}
    if inputs <= set(golden.arrays):
        cfg, params = model("x_start", "")
        for name in golden.below("out/sample/out_"):
            parts = re.fullmatch(r"enc(0|1)(?:_cs([0-9.]+)_T(\d+))?", name)
            if parts is not None:
                solver = make_solver(cfg, int(parts[3] or golden.settings.get("sample_timesteps", SAMPLE_STEPS)))
                values[f"out/sample/out_{name}"] = _best_of(
                    golden, params, cfg, solver, parts[1] == "1", float(parts[2] or 1)
                )
    notes = [AGAINST_NOISE] if scales else []
    return Recomputed(values=values, inputs=frozenset(inputs), scales=scales, notes=notes)


def _run(
    params: PriorParams,
    cfg: PriorConfig,
    solvers: list[SolverTable],
    guidance: list[float],
    text: Any,
    encodings: Any,
    noise: Any,
) -> tuple[Any, Any]:
    """Run each solver on an equal share of the rows."""
    n = len(text) // len(solvers)
    rows = stack_solvers([p for p in solvers for _ in range(n)], [g for g in guidance for _ in range(n)])
    guided, longest = any(g != 1.0 for g in guidance), max(map(len, solvers))
    return run(params, text, encodings, rows, noise, cfg=cfg, guided=guided, n_step=longest, keep_path=True)


def _best_of(
    golden: Golden, params: PriorParams, cfg: PriorConfig, solver: SolverTable, has_encodings: bool, guidance: float
) -> Any:
    """Sample several candidates per text, in adjacent rows, and keep the best."""
    text, encodings, noise = (golden.get(f"out/sample/{n}") for n in ("text_embed", "text_encodings", "noise"))
    n = noise.shape[1] // len(text)
    wide, enc = np.repeat(text, n, axis=0), np.repeat(encodings, n, axis=0) if has_encodings else None
    samples, _ = _run(params, cfg, [solver], [guidance], wide, enc, jnp.asarray(noise))
    return best(samples.reshape(len(text), n, -1), jnp.asarray(text))


def recompute_trainer(golden: Golden) -> Recomputed:
    """Recompute loss, gradient, clipping, AdamW and the moving average step by step, with the noise and times of the file."""
    settings, prior = golden.settings, settings_group(golden, "prior")
    cfg, params = load_model(golden, settings_group(golden, "network"), timesteps=prior["timesteps"])
    n_step = len(golden.get("in/image_embed"))
    cosine_steps = settings.get("cosine_decay_max_steps")
    optim = OptimConfig(
        lr=settings["lr"],
        decay=settings["wd"],
        decay_by_lr=True,
        decay_vectors=not settings.get("group_wd_params", True),
        b1=settings["betas"][0],
        b2=settings["betas"][1],
        eps=settings["eps"],
        clip=settings.get("max_grad_norm"),
        warmup_steps=settings.get("warmup_steps") or 0,
        schedule="dampened_constant" if cosine_steps is None else "dampened_cosine",
        steps=cosine_steps
        or 1 + n_step + (settings.get("warmup_steps") or 0),  # without a cosine the length does not matter
    )
    prefix = "ema_"
    average = ema.EmaConfig(**{n.removeprefix(prefix): v for n, v in settings.items() if n.startswith(prefix)})
    rule, multiplier = optimizer(optim, param_specs(cfg)), schedule(optim)
    has_encodings = prior.get("condition_on_text_encodings", True)

    @jax.jit
    def update(params: Any, state: Any, mean: Any, step: Any, image: Any, text: Any, enc: Any, draws: Draws) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, image, text, enc if has_encodings else None, draws, cfg)
        updates, state = rule.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, ema.update(average, mean, params, step), value, optax.tree.norm(gradient)

    every = jnp.ones(golden.get("in/times").shape[1], bool)
    state, mean = rule.init(params), params  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    losses, norms = [], []
    for i in range(n_step):
        image, text, enc, noise, times = (
            golden.get(f"in/{n}")[i] for n in ("image_embed", "text_embed", "text_encodings", "noise", "times")
        )
        draws = Draws(times=times, noise=noise, keep_text=every, keep_image=every, self_conditioned=every, dropout=None)  # pyright: ignore[reportArgumentType]
        params, state, mean, value, norm = update(params, state, mean, i, image, text, enc, draws)
        losses.append(value)
        norms.append(norm)
        for which, tree in (("model", params), ("ema", mean)):
            values |= {f"out/step{i + 1}/{which}/{name}": x for name, x in to_reference(tree, cfg).items()}
    steps = np.arange(n_step)
    n_group = golden.get("out/lr_used").shape[1]
    values |= {
        "out/loss": np.stack(losses),
        "out/grad_norm_preclip": np.stack(norms),
        "out/lr_used": np.repeat(optim.lr * np.asarray(multiplier(steps))[:, None], n_group, axis=1),
        "out/lr_after": np.repeat(optim.lr * np.asarray(multiplier(n_step)), n_group),
        "out/ema_decay_after_update": np.stack([ema.decay(average, i + 1) for i in steps]),
        "out/ema_step": np.asarray([n_step]),
        "out/ema_initted": np.asarray([float(n_step > ema.begins(average))]),
    }
    return Recomputed(values=values, scales={"out/lr_used": optim.lr, "out/lr_after": optim.lr})
