"""Validation of a prior's conditions for sampling, shared by the command line and the server."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from linnet.core.errors import invalid
from linnet.models.prior.config import PriorConfig


def check_encodings(shape: tuple[int, ...] | None, cfg: PriorConfig, field: str = "text_encodings") -> None:
    """Check the shape [positions, width] of one text's token encodings; None: none were given.

    A prior that was trained with encodings must not be sampled without them: it would see only padding, which it never saw in
    training. Padding is all zeros, so a row of zeros states explicitly that a text has no tokens."""
    if shape is None:
        if cfg.text_encodings:
            needs = f"given: this prior was trained with the token encodings of its texts (positions x {cfg.d_text})"
            fix = "give the text itself, or its token encodings beside its embedding (a row of zeros: none)"
            raise invalid(field, None, needs, fix)
        return
    if not cfg.text_encodings:
        needs = "left out: this prior was trained without token encodings, as its config says"
        fix = "leave it out; a prior that `linnet import` assumed to be so is imported again with --text-encodings"
        raise invalid(field, "given", needs, fix)
    max_len = cfg.max_text_len or None
    n, width = shape
    if n < 1 or (max_len is not None and n > max_len) or width != cfg.d_text:
        positions = "at least 1" if max_len is None else f"1 to {max_len}"
        fix = "use the model's own encoder" + ("" if max_len is None else f", and the first {max_len} positions")
        raise invalid(field, f"{n} positions of width {width}", f"{positions} of width {cfg.d_text}", fix)


def truncate_encodings(
    encodings: Float32[np.ndarray, "L X"] | None, cfg: PriorConfig
) -> Float32[np.ndarray, "K X"] | None:
    """Truncate an encoder's output to the positions that the prior has."""
    return None if encodings is None else encodings[: cfg.max_text_len or None]
