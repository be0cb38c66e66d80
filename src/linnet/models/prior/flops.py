"""FLOPs of a prior's forward pass; products that are skipped are not counted."""

from __future__ import annotations

from linnet.models.prior.config import PriorConfig


def flops_of(cfg: PriorConfig, n_token: int, *, n_past: int, n_last: int) -> float:
    """Return the FLOPs of one row's forward pass over `n_token` tokens after `n_past` others. In the last layer all tokens have keys
    and values, but only `n_last` are computed further."""
    wide, hidden = cfg.n_head * cfg.d_head, cfg.ff_mult * cfg.dim
    of_keys, of_rest = 2 * cfg.dim * 2 * cfg.d_head, 2 * cfg.dim * (2 * wide + 3 * hidden)
    looking = 2 * 2 * wide * (1 + n_past + n_token)
    whole_layers = (cfg.depth - 1) * n_token * (of_keys + of_rest + looking)
    return whole_layers + n_token * of_keys + n_last * (of_rest + looking + 2 * cfg.dim**2 * cfg.final_proj)
