"""Every parameter of every family starts from the reference's distribution: its kind, mean and variance.

The tables below are written from the references, not from the code.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import jax
import numpy as np
import pytest

from linnet.core.params import init
from linnet.core.pytree import named_leaves
from linnet.models.moe.config import MoEConfig
from linnet.models.prior.config import PriorConfig
from linnet.models.registry import get
from linnet.models.vq.config import VQConfig

Kind = Literal["normal", "uniform", "zeros", "ones"]
KURTOSIS = {"normal": 3.0, "uniform": 1.8}


@dataclasses.dataclass(frozen=True)
class Wanted:
    kind: Kind
    variance: float = 0.0


def linear(n_in: int) -> Wanted:
    """torch's default, of weights and biases: uniform within 1 / sqrt(n_in)."""
    return Wanted("uniform", 1 / (3 * n_in))


def scaled(n_in: int) -> Wanted:
    """Variance scaling 1.0, fan in, normal."""
    return Wanted("normal", 1 / n_in)


ONE, ZERO, NORMAL = Wanted("ones"), Wanted("zeros"), Wanted("normal", 1.0)
PRIOR = PriorConfig(
    dim=48, depth=2, n_head=3, d_head=32, ff_mult=3, max_text_len=20, text_encodings=True, timesteps=50, norm_in=True,
    normformer=True, n_time_token=2, n_image_token=3, n_text_token=2,
)  # fmt: skip
PRIOR_LAYERS = {
    "layers/(attention_gain|out_gain|ff_gain|mid_gain)|in_gain|out_gain": ONE,
    "layers/null_kv|query|null_encodings|null_text|null_image|bias": NORMAL,
    "layers/(w_q|w_kv|w_in)|w_proj|image_tokens/(w|b)": linear(48),
    "layers/w_out": linear(96),
    "layers/w_back": linear(144),
}
VQ = VQConfig(n_vocab=64, d_model=48, n_layer=1, n_head=2, d_k=16, d_v=48, n_code=24, pe_abs=True)
VQ_UNITS = {
    "embed": NORMAL,  # the reference multiplies it by e_scale when it is read
    "position_scale|units/(norm_bias|u|w)|out_norm_bias|out_bias": ZERO,
    "units/norm_gain|out_gain|code_count": ONE,
    "units/(w_q|w_kvg|w_r)|w_out": scaled(48),
    "units/w_res": scaled(96),
    "code_total": scaled(2 * 24),
}
# Grok-1's released code only infers (its own initial weights are zeros), so these are Linnet's: every matrix keeps the scale of
# what goes in, and the embedding, which is the output's matrix too, gives logits of variance 1.
MOE = MoEConfig(n_vocab=64, d_model=48, n_layer=2, n_q_head=4, n_kv_head=2, d_k=16, n_expert=4)
TABLES: dict[str, tuple[Any, dict[str, Wanted]]] = {
    "prior": (PRIOR, {**PRIOR_LAYERS, "time": NORMAL, "text_tokens/(w|b)": linear(48)}),
    "prior_continuous": (
        dataclasses.replace(PRIOR, continuous_time=True, text_dim=30),
        {
            **PRIOR_LAYERS,
            "time/first/(w|b)": linear(48),
            "time/(second|out)/(w|b)": linear(2 * 2 * 48),
            "text_tokens/(w|b)|encoding": linear(30),
        },
    ),
    "vq": (VQ, VQ_UNITS),
    "vq_condition": (
        dataclasses.replace(VQ, d_condition=30, n_place=9),
        {**VQ_UNITS, "w_condition": scaled(30), "place": ZERO},
    ),
    "vq_moe": (
        dataclasses.replace(VQ, n_expert=4),
        {**VQ_UNITS, "mixture/(in_gain|out_gain)": ONE, "mixture/(router|experts/(gate|value))": scaled(48)},
    ),
    "moe": (
        MOE,
        {
            "embed": scaled(48),
            "out_gain|layers/(attention|experts)_(in|out)_gain": ONE,
            "layers/(w_q|w_k|w_v|router|experts/(gate|value))": scaled(48),
            "layers/w_o": scaled(64),
        },
    ),
}


def expected(name: str, shape: tuple[int, ...], table: dict[str, Wanted]) -> Wanted:
    if name.endswith("experts/out"):  # its hidden width is a rounded one
        return scaled(shape[-2])
    found = [wanted for pattern, wanted in table.items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, f"{name}: {len(found)} rows of the table"
    return found[0]


def check(name: str, values: np.ndarray, wanted: Wanted) -> None:
    flat = values.astype(np.float64).ravel()
    if wanted.kind in ("zeros", "ones"):
        assert np.all(flat == (wanted.kind == "ones")), name
        return
    n, spread = flat.size, math.sqrt(wanted.variance)
    z = flat / spread
    kurtosis = KURTOSIS[wanted.kind]
    # Five standard errors of each.
    assert abs(z.mean()) < 5 / math.sqrt(n), name
    assert abs(np.mean(z**2) - 1) < 5 * math.sqrt((kurtosis - 1) / n), name
    if wanted.kind == "uniform":
        assert np.abs(z).max() <= math.sqrt(3) * (1 + 1e-6), name
    if n >= 500:  # with fewer, the fourth moment says nothing
        assert abs(np.mean(z**4) - kurtosis) < (2.5 if wanted.kind == "normal" and n < 4000 else 0.6), name
        assert (np.abs(z).max() > 2) == (wanted.kind == "normal"), name


@pytest.mark.parametrize("case", TABLES)
def test_every_parameter_starts_from_the_references_distribution(case: str) -> None:
    cfg, table = TABLES[case]
    family = get(case.split("_")[0])
    specs = (family.param_specs(cfg), family.buffer_specs(cfg))
    for seed in (0, 1):
        for name, leaf in named_leaves(init(specs, jax.random.key(seed))):
            name = name.split("/", 1)[1]
            check(f"{case} {name}", np.asarray(leaf), expected(name, leaf.shape, table))
