"""The bound of bfloat16 grows with depth, tensor by tensor, and still sees a wrong model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from grok_files import CONFIG, write_release

from linnet.verify import Verification, verify_file
from linnet.verify.moe.positions import BFLOAT16, bfloat16_bound, close_ranks, near_tie
from linnet.verify.moe.sequences import GrokModel, open_model
from linnet.verify.recomputed import Recomputed

LAYER_0, LAYER_10 = (f"cap/transformer/decoder_layer_{i}:out" for i in (0, 10))
ATTENTION_5 = "cap/transformer/decoder_layer_5/multi_head_attention:out"
DEEP = dataclasses.replace(CONFIG, n_expert=2)
TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GrokModel:
    """Eleven layers. Of two experts that are both chosen none is near a tie, so that no position is left out."""
    folder = tmp_path_factory.mktemp("deep")
    write_release(folder, DEEP)
    sizes = (
        "n_vocab",
        "d_model",
        "d_k",
        "n_q_head",
        "n_kv_head",
        "n_layer",
        "n_expert",
        "n_choice",
        "widening",
        "context",
    )
    (folder / "config.json").write_text(json.dumps({name: getattr(DEEP, name) for name in sizes}))
    np.savez(folder / "forward.npz", tokens=TOKENS)
    return open_model(folder / "forward.npz", Recomputed())


def expected(m: GrokModel) -> dict[str, np.ndarray]:
    """What another correct program computes: float32, which rounds nothing."""
    run = m.read("f32pure", TOKENS)
    return {
        "full_logits": run.logits,
        ATTENTION_5: run.inner[0][5],
        LAYER_0: run.inner[2][0],
        LAYER_10: run.inner[2][10],
    }


def verified(m: GrokModel, values: dict[str, np.ndarray], **added: float) -> Verification:
    """`added`: an error at the first position, relative to the largest value."""
    arrays: dict[str, Any] = {"tokens": TOKENS}
    names = {"logits": "full_logits", "first": LAYER_0, "last": LAYER_10}
    errors = {names[name]: size for name, size in added.items()}
    for name, value in values.items():
        value = np.array(value)
        value[0, 0, 0] += errors.get(name, 0.0) * np.abs(value).max() * np.sign(value[0, 0, 0])
        arrays[f"bf16/{name}"] = value
    np.savez(m.golden.path, **arrays)
    return verify_file(m.golden.path.parent)


def failed(result: Verification) -> list[str]:
    return [check.name.removeprefix("bf16/") for check in result.checks if not check.passed]


def test_deep_model_has_a_wider_bound_and_says_so(model: GrokModel) -> None:
    assert bfloat16_bound(1) == bfloat16_bound(2) == BFLOAT16
    assert bfloat16_bound(8) == pytest.approx(2 * BFLOAT16)
    values = expected(model)
    result = verified(model, values)
    assert failed(result) == []
    assert any("sqrt(layers / 2)" in note and "0.0938 after all 11" in note for note in result.notes)
    errors = {check.name.removeprefix("bf16/"): check.error for check in result.checks}
    assert errors[LAYER_0] < errors[LAYER_10] < bfloat16_bound(11)


def test_wrong_number_is_still_seen(model: GrokModel) -> None:
    """The first layer keeps the bound that was measured; the last has the wide one, and no more."""
    values = expected(model)
    assert failed(verified(model, values, first=0.09, last=0.05, logits=0.05)) == [LAYER_0]
    assert set(failed(verified(model, values, last=0.2, logits=0.2))) == {"full_logits", LAYER_10}


def test_wrong_model_is_still_seen(model: GrokModel) -> None:
    scaled = dataclasses.replace(model.cfg, embed_scale=1.3 * model.cfg.embed_scale)
    assert failed(verified(model, expected(dataclasses.replace(model, cfg=scaled))))
    layers = model.params.layers
    wrong = dataclasses.replace(layers, w_v=_negated(layers.w_v))
    other = dataclasses.replace(model, params=dataclasses.replace(model.params, layers=wrong))
    assert failed(verified(model, expected(other))) == [ATTENTION_5]  # beside the residual stream it is small


def _negated(leaf: Any) -> Any:
    """One layer of eleven, negated."""
    factor = np.where(np.arange(11) == 5, -1.0, 1.0)
    leaves, tree = jax.tree.flatten(leaf)
    leaves[-1] = leaves[-1] * factor.reshape(-1, *(1,) * (leaves[-1].ndim - 1)).astype(leaves[-1].dtype)
    return jax.tree.unflatten(tree, leaves)


def test_ties_widen_with_depth_in_bfloat16_only() -> None:
    probability = np.array([0.515, 0.5, 0.0]).reshape(1, 1, 1, 3).repeat(16, axis=0)
    depth = np.arange(1, 17)[:, None, None]
    ties = near_tie(probability, 1, "bf16", depth)[:, 0, 0]
    assert not ties[:4].any()
    assert ties[5:].all()
    assert not near_tie(probability, 1, "f32", depth).any()


def test_expert_with_zero_weight_is_no_tie() -> None:
    probability = np.array([0.99, 0.006, 0.004]).reshape(1, 1, 3)
    assert close_ranks(probability, 2, "bf16").all()
    assert not near_tie(probability, 2, "bf16").any()
