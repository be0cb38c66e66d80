"""Recompute the results of a Transformer-VQ reference file with this implementation: the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from linnet.core.errors import UserError
from linnet.core.special_tokens import EOS
from linnet.data.batch import Batch
from linnet.models.vq import family, model
from linnet.models.vq.config import VQConfig
from linnet.models.vq.convert import config_from_reference, from_reference, to_reference
from linnet.models.vq.params import VQBuffers, VQParams
from linnet.verify.golden import Golden
from linnet.verify.recomputed import RANDOM, Recomputed

DOCUMENTS = "Linnet keeps document ids only when it resets at documents, which the reference never does"


@dataclasses.dataclass(frozen=True)
class Model:
    cfg: VQConfig
    params: VQParams
    buffers: VQBuffers

    def read(self, carry: model.VQCarry, tokens: Any, **options: Any) -> tuple[Any, ...]:
        """Return log-probabilities, hidden vectors, the carry after, and auxiliary outputs of the units."""

        def run(params: VQParams, buffers: VQBuffers, carry: model.VQCarry, tokens: Int[Array, "B T"]) -> Any:
            x, carry, aux = model.forward(params, buffers, tokens, carry, self.cfg, **options)
            return jax.nn.log_softmax(model.logits(params, x, self.cfg)), x, carry, aux

        return jax.jit(run)(self.params, self.buffers, carry, jnp.asarray(tokens))

    def decode(self, carry: model.VQCarry, token: Int[Array, " B"]) -> tuple[Float[Array, "B A"], model.VQCarry]:
        """Return the logits after one more token per row, and the carry after it."""
        x, carry, _ = model.forward(self.params, self.buffers, token[:, None], carry, self.cfg, block_len=1)
        return model.logits(self.params, x[:, 0], self.cfg), carry


def load_model(golden: Golden) -> Model:
    """Load the model. Unknown settings are ignored: if one matters, the results differ."""
    cfg = config_from_reference(golden.settings, ignore_unknown=True)
    return Model(cfg, *from_reference(golden.params, cfg))


def recompute_forward(golden: Golden) -> Recomputed:
    m, tokens = load_model(golden), _tokens(golden)
    logprobs, x, carry, aux = m.read(model.empty_carry(m.cfg, len(tokens)), tokens, keep_outputs=True)
    values = {"logprobs": logprobs, "final_x": x, "gau_res": aux.output, "shortcodes": aux.codes}
    return _with_state(Recomputed(values=values), golden, "state", carry, m.cfg)


def recompute_carry(golden: Golden) -> Recomputed:
    m, tokens = load_model(golden), _tokens(golden)
    half = golden.get("out/logprobs_1").shape[1]
    first, _, middle, _ = m.read(model.empty_carry(m.cfg, len(tokens)), tokens[:, :half])
    second, _, end, _ = m.read(middle, tokens[:, half:])
    recomputed = Recomputed(values={"logprobs_1": first, "logprobs_2": second})
    recomputed = _with_state(recomputed, golden, "midstate", middle, m.cfg)
    return _with_state(recomputed, golden, "state", end, m.cfg)


def recompute_decode(golden: Golden) -> Recomputed:
    m, tokens = load_model(golden), jnp.asarray(_tokens(golden))

    def one(carry: model.VQCarry, token: Int[Array, " B"]) -> tuple[model.VQCarry, Float[Array, "B A"]]:
        logits, carry = m.decode(carry, token)
        return carry, jax.nn.log_softmax(logits)

    run = jax.jit(lambda carry, tokens: jax.lax.scan(one, carry, tokens.T))
    carry, logprobs = run(model.empty_carry(m.cfg, len(tokens)), tokens)
    return _with_state(Recomputed(values={"logprobs": jnp.moveaxis(logprobs, 0, 1)}), golden, "state", carry, m.cfg)


def recompute_sample(golden: Golden) -> Recomputed:
    """Decode greedily, starting with the EOS id."""
    m, (batch, length) = load_model(golden), golden.get("out/greedy_tokens").shape
    start = jnp.full((batch,), golden.settings.get("eos_id", EOS), jnp.int32)

    def one(state: tuple[model.VQCarry, Array], _: None) -> tuple[tuple[model.VQCarry, Array], Array]:
        logits, carry = m.decode(*state)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (carry, token), token

    run = jax.jit(lambda carry, token: jax.lax.scan(one, (carry, token), None, length=length)[1])
    tokens = run(model.empty_carry(m.cfg, batch), start)
    random = [name for name in golden.outputs if name.endswith("_tokens") and name != "greedy_tokens"]
    return Recomputed(values={"greedy_tokens": tokens.T}, skipped=dict.fromkeys(random, RANDOM))


def recompute_eval(golden: Golden) -> Recomputed:
    m, batch = load_model(golden), read_batch(golden)
    nats, _ = jax.jit(lambda p, b, c, x: family.nats(p, b, c, x, m.cfg))(
        m.params, m.buffers, model.empty_carry(m.cfg, len(batch.inputs)), batch
    )
    return Recomputed(
        values={
            "stats/loss_lm_per_token_unscaled": jnp.mean(batch.loss_mask * nats),
            "stats/loss_mask_per_token": np.mean(batch.loss_mask),
        }
    )


def recompute_grads(golden: Golden) -> Recomputed:
    m, batch = load_model(golden), read_batch(golden)
    check_no_dropout(golden, m.cfg)
    carry = model.empty_carry(m.cfg, len(batch.inputs))
    run = jax.jit(jax.value_and_grad(lambda p, b, c, x: family.loss(p, b, c, x, None, 0, m.cfg), has_aux=True))
    (loss, aux), gradient = run(m.params, m.buffers, carry, batch)
    after = family.update_buffers(m.buffers, aux.statistics, m.cfg)
    # The reference's codebooks learn through artificial gradients: new = old - gradient.
    decrease = jax.tree.map(lambda old, new: old - new, m.buffers, after)
    metrics = all_metrics(m.buffers, aux.metrics, m.cfg)
    return Recomputed(
        values={
            "loss": loss,
            "l_lm_unscaled": aux.metrics["loss_lm_per_token_unscaled"],
            "l_commit": aux.metrics["loss_commit_per_token"],
            "l_codebook": 0.0,  # zero in value; it only produces those gradients
            **{f"metrics/{name}": value for name, value in metrics.items()},
            **{f"grads/{name}": value for name, value in to_reference(gradient, decrease, m.cfg).items()},
        },
        scales=metric_scales(golden, "metrics"),
    )


def all_metrics(buffers: VQBuffers, metrics: dict[str, Array], cfg: VQConfig) -> dict[str, float]:
    diagnostics = family.diagnostics(buffers, metrics, cfg)
    scalars = {name: float(value) for name, value in metrics.items() if jnp.ndim(value) == 0}
    return scalars | {name: value for name, value in diagnostics.items() if isinstance(value, float)}


def metric_scales(golden: Golden, prefix: str) -> dict[str, float]:
    """Return the scale for the mean similarity of codes, which nearly cancels: the largest absolute similarity."""
    ends = [golden.outputs.get(f"{prefix}/c_sim_{end}") for end in ("min", "max")]
    known = [abs(float(value)) for value in ends if value is not None]
    return {f"{prefix}/c_sim_mean": max(known)} if known else {}


def read_batch(golden: Golden, prefix: str = "") -> Batch:
    parts = {name: golden.get(f"in/{prefix}{name}") for name in ("inputs", "targets")}
    shape = parts["inputs"].shape
    doc_ids = golden.inputs.get(f"{prefix}doc_ids", np.zeros(shape, np.int32))
    mask = golden.inputs.get(f"{prefix}loss_mask", np.ones(shape, np.int32))
    parts |= {"doc_ids": doc_ids, "loss_mask": mask}
    for name, value in parts.items():
        if value.ndim != 2 or value.shape != shape:
            raise UserError(
                f"{golden.path}: in/{prefix}{name} has shape {value.shape}, but it must be B x T like inputs."
            )
    ids = {name: np.asarray(parts[name], np.int32) for name in ("inputs", "targets", "doc_ids")}
    return Batch(**ids, loss_mask=np.asarray(mask, np.float32))


def check_no_dropout(golden: Golden, cfg: VQConfig) -> None:
    if cfg.p_dropemb or cfg.p_dropsin or cfg.p_dropres or cfg.p_droplyr:
        raise UserError(
            f"{golden.path} was made with dropout, which {RANDOM}. Fix: make it again with every dropout set to 0."
        )


def _tokens(golden: Golden) -> np.ndarray:
    tokens = golden.get("in/inputs")
    if tokens.ndim != 2:
        raise UserError(f"{golden.path}: in/inputs has shape {tokens.shape}, but it must be B x T.")
    return tokens.astype(np.int32)


def _with_state(recomputed: Recomputed, golden: Golden, prefix: str, carry: model.VQCarry, cfg: VQConfig) -> Recomputed:
    """Add our carry in the reference's form. Columns without a token yet are excluded, because they are meaningless."""
    state, n_read = carry.attention, int(carry.position[0])
    filled = min(n_read, cfg.mem_len)
    values, expected, skipped = dict(recomputed.values), dict(recomputed.expected), dict(recomputed.skipped)
    for i in range(cfg.n_unit):
        unit = f"{prefix}/{i // 2}/{i % 2}"
        window = {"z": state.codes[i], "k_hat": state.keys[i], "v": state.values[i]}
        for name, value in window.items():
            full = f"{unit}/xlcache/{name}"
            values[full] = value
            if filled < cfg.mem_len and full in golden.outputs and golden.outputs[full].shape == value.shape:
                values[full] = value[:, :, cfg.mem_len - filled :]
                expected[full] = golden.outputs[full][:, :, cfg.mem_len - filled :]
        values |= {
            f"{unit}/pos_offset": np.int32(n_read),
            f"{unit}/aggcache/lower": state.count[i],
            f"{unit}/aggcache/upper_div_lower": state.total[i] / jnp.maximum(state.count[i], 1.0)[..., None],
        }
        skipped |= dict.fromkeys((f"{unit}/xlcache/doc_ids", f"{unit}/aggcache/latest_doc_id"), DOCUMENTS)
    return dataclasses.replace(recomputed, values=values, expected=expected, skipped=skipped)
