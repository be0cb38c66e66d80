"""Diffusion solvers as data: which steps a row visits, and the coefficients of each update.

In DDPM, DDIM and DPM-Solver++(2M) the next value is a linear combination of the current value, the predicted start, the previously
predicted start, and fresh noise. So a row's solver is a table of four factors per step, and rows with different solvers, step counts
and progress can share a batch. Letters: S steps of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from linnet.core.errors import invalid
from linnet.models.prior import schedule as noise_of
from linnet.models.prior.config import PriorConfig

ALL_NOISE = -5.1  # half log-SNR where solvers may start: less than 1% is signal

Solver = Literal["ddpm", "ddim", "dpm"]
SOLVERS: tuple[Solver, ...] = ("ddpm", "ddim", "dpm")
_USUAL_STEPS: dict[Solver, int] = {"dpm": 16, "ddim": 64}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SolverTable:
    """Predicted start = of_x x + of_output output; next = keep x + start (predicted start) + before (the previous one) + noise e."""

    times: Int[np.ndarray, " S"]
    of_x: Float[np.ndarray, " S"]
    of_output: Float[np.ndarray, " S"]
    keep: Float[np.ndarray, " S"]
    start: Float[np.ndarray, " S"]
    before: Float[np.ndarray, " S"]
    noise: Float[np.ndarray, " S"]

    def __len__(self) -> int:
        return len(self.times)

    def factors(self) -> Float[np.ndarray, "S 6"]:
        """Return all columns except the times, in the order above."""
        found = (self.of_x, self.of_output, self.keep, self.start, self.before, self.noise)
        return np.stack(found, axis=-1).astype(np.float32)


def default_steps(cfg: PriorConfig, solver: Solver) -> int:
    """Return the default number of steps. DDPM uses all of them."""
    return min(_USUAL_STEPS.get(solver, cfg.timesteps), cfg.timesteps)


def make_solver(
    cfg: PriorConfig, steps: int | None = None, solver: Solver | None = None, eta: float = 1.0
) -> SolverTable:
    """Make a solver table. `steps`: None for all. `solver`: None for DDPM with all steps and DDIM otherwise, as in the reference."""
    steps = cfg.timesteps if steps is None else steps
    solver = solver or ("ddpm" if steps >= cfg.timesteps else "ddim")
    if not 2 <= steps <= cfg.timesteps:
        raise invalid("steps", steps, f"from 2 to {cfg.timesteps}, the steps it was trained with", "use 64")
    if solver == "ddpm" and steps != cfg.timesteps:
        raise invalid("steps", steps, f"{cfg.timesteps} with ddpm, which takes them all", "use ddim or dpm")
    if not 0 <= eta <= 1:
        raise invalid("eta", eta, "between 0 (no noise) and 1", "use 1")
    if solver == "ddpm":
        return _ddpm(cfg)
    return _ddim(cfg, steps, eta) if solver == "ddim" else _dpm(cfg, steps)


def ddim_times(timesteps: int, steps: int) -> Int[np.ndarray, " S1"]:
    """Return the visited steps, from noise to start, and -1 for the start itself: one more than the number of steps."""
    # torch's float32 linspace counts from both ends towards the middle, which affects the truncation to integers.
    n, step = steps + 1, np.float32(timesteps + 1) / np.float32(steps)
    low = np.float32(-1) + step * np.arange(n, dtype=np.float32)
    high = np.float32(timesteps) - step * np.arange(n - 1, -1, -1, dtype=np.float32)
    found = np.where(np.arange(n) < n // 2, low, high)[:-1]
    return np.trunc(found).astype(np.int64)[::-1]


def _ddpm(cfg: PriorConfig) -> SolverTable:
    table = noise_of.tables(cfg.schedule, cfg.timesteps)
    times = np.arange(cfg.timesteps)[::-1]
    spread = np.exp(np.float32(0.5) * table.posterior_log_variance_clipped[times])
    return _plan(
        cfg,
        times,
        keep=table.posterior_mean_coef2[times],
        start=table.posterior_mean_coef1[times],
        noise=np.where(times > 0, spread, 0.0),
    )


def _ddim(cfg: PriorConfig, steps: int, eta: float) -> SolverTable:
    table = noise_of.tables(cfg.schedule, cfg.timesteps)
    visited = ddim_times(cfg.timesteps, steps)
    times, after = visited[:-1], visited[1:]
    # Every operation is rounded to float32 like the reference: near the start the differences have few significant digits.
    one, kept = np.float32(1), table.alphas_cumprod_prev
    now, then = kept[times], kept[np.maximum(after, 0)]
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.float32(eta) * np.sqrt((one - now / then) * (one - then) / (one - now))
    spread = np.nan_to_num(spread)
    direction = np.sqrt(np.maximum((one - then) - np.square(spread), 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        fraction = direction.astype(np.float64) / table.sqrt_recipm1_alphas_cumprod[times]
    ends = after < 0
    return _plan(
        cfg,
        times,
        keep=np.where(ends, 0.0, fraction * table.sqrt_recip_alphas_cumprod[times]),
        start=np.where(ends, 1.0, np.sqrt(then.astype(np.float64)) - fraction),
        noise=np.where(after > 0, spread, 0.0),
    )


def dpm_times(cfg: PriorConfig, steps: int) -> Int[np.ndarray, " S"]:
    """Return steps evenly spaced in half log-SNR, from almost pure noise to the last step; fewer than `steps` if a short diffusion
    has no distinct ones."""
    kept = np.cumprod(1 - noise_of.betas(cfg.schedule, cfg.timesteps), dtype=np.float64)
    with np.errstate(divide="ignore"):
        log_snr = 0.5 * (np.log(kept) - np.log1p(-kept))
    wanted = np.linspace(max(log_snr[-1], ALL_NOISE), log_snr[0], steps)
    return np.unique(np.argmin(np.abs(log_snr - wanted[:, None]), axis=1))[::-1]


def _dpm(cfg: PriorConfig, steps: int) -> SolverTable:
    """DPM-Solver++(2M) in half log-SNR; its last step goes to the start itself."""
    times = dpm_times(cfg, steps)
    kept = np.cumprod(1 - noise_of.betas(cfg.schedule, cfg.timesteps), dtype=np.float64)[times]
    alpha, sigma = np.sqrt(kept), np.sqrt(1 - kept)
    keep, start, before = np.zeros((3, len(times)))
    start[-1] = 1.0
    with np.errstate(divide="ignore"):
        log_snr = np.log(alpha) - np.log(sigma)
    for i in range(len(times) - 1):
        h = log_snr[i + 1] - log_snr[i]
        keep[i] = sigma[i + 1] / sigma[i]
        full_step = -alpha[i + 1] * np.expm1(-h)
        # Weight of the second-order correction by the previous prediction; the first step has none.
        follow = h / (2 * (log_snr[i] - log_snr[i - 1])) if i else 0.0
        start[i], before[i] = full_step * (1 + follow), -full_step * follow
    return _plan(cfg, times, keep=keep, start=start, before=before, noise=np.zeros(len(times)))


def _plan(
    cfg: PriorConfig,
    times: np.ndarray,
    *,
    keep: np.ndarray,
    start: np.ndarray,
    noise: np.ndarray,
    before: np.ndarray | None = None,
) -> SolverTable:
    table = noise_of.tables(cfg.schedule, cfg.timesteps)
    of_x, of_output = {
        "x_start": (np.zeros(len(times)), np.ones(len(times))),
        "noise": (table.sqrt_recip_alphas_cumprod[times], -table.sqrt_recipm1_alphas_cumprod[times]),
        "v": (table.sqrt_alphas_cumprod[times], -table.sqrt_one_minus_alphas_cumprod[times]),
    }[cfg.objective]
    before = np.zeros(len(times)) if before is None else before
    return SolverTable(times=times, of_x=of_x, of_output=of_output, keep=keep, start=start, before=before, noise=noise)
