"""Recompute the network and loss results of a prior's reference file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.core.errors import UserError
from linnet.core.pytree import replace
from linnet.models.prior import layers, schedule
from linnet.models.prior import network as net
from linnet.models.prior.config import PriorConfig
from linnet.models.prior.convert import ROTARY, from_reference, to_reference
from linnet.models.prior.diffusion import Draws, loss, row_errors
from linnet.models.prior.reference import infer_config
from linnet.models.prior.releases import Release, check_settings, recognize
from linnet.models.prior.tokens import time_tokens
from linnet.nn.norm import layer_norm
from linnet.verify.float64 import evaluate_in_float64
from linnet.verify.golden import Golden
from linnet.verify.prior.model import load_model, release_version, settings_group
from linnet.verify.recomputed import Recomputed

FREQUENCIES = "rotary frequencies are not trained"


Keep = tuple[np.ndarray, np.ndarray]
"""Rows whose text and image condition is kept."""


def _network(cfg: PriorConfig) -> Any:
    def run(params: Any, image: Any, t: Any, text: Any, encodings: Any, keep: Any, known: Any, mask: Any) -> Any:
        return net.network(params, image, t, text, encodings, keep[0], keep[1], known, cfg, mask=mask)

    return jax.jit(run)


def recompute_network(golden: Golden) -> Recomputed:
    release = recognize(golden.below("params/"), version=release_version(golden))
    cfg, params = load_model(golden, golden.settings)
    run = _network(cfg)
    image, t, text = (golden.get(f"in/{name}") for name in ("image_embed", "times", "text_embed"))
    every = np.ones(len(image), bool)
    keep = {
        "": (every, every),
        "drop_text": (~every, every),
        "drop_image": (every, ~every),
        "drop_both": (~every, ~every),
    }
    if any(name.endswith("_masks") for name in golden.below("out/")):
        keep["masks"] = (golden.get("in/text_keep_mask"), golden.get("in/image_keep_mask"))

    def output(which: str, keep: Keep, known: Any) -> Any:
        encodings = None if which == "noenc" else golden.get(f"in/text_enc_{which}")
        return run(params, image, t, text, encodings, keep, known, None)

    return _recompute_outputs(golden, release, keep, keep["drop_both"], output)


def recompute_legacy(golden: Golden) -> Recomputed:
    """Recompute the network of an older release, which is identified by its weights and version."""
    state, settings = golden.below("params/net."), golden.settings
    release = recognize(state, version=release_version(golden))
    self_cond = bool(settings.get("self_cond", False))
    check_settings(release, self_cond=self_cond, objective="x_start")
    cfg = infer_config(state, None, {"self_cond": self_cond}, release)
    if cfg.masks_text and not settings.get("attend_all_text_encodings", True):
        cfg = replace(cfg, text_mask="nonzero")
    params, run = from_reference(state, cfg), _network(cfg)
    image, t, text = (golden.get(f"in/{name}") for name in ("x", "t", "text_embed"))
    every = np.ones(len(image), bool)

    def output(which: str, keep: Keep, known: Any) -> Any:
        if which not in ("enc", "noenc"):
            return None
        has_encodings = which == "enc"
        encodings = golden.get("in/text_encodings") if has_encodings else None
        mask = golden.arrays.get("in/mask") if has_encodings else None
        return run(params, image, t, text, encodings, keep, known, mask)

    keep = {"": (every, every), "drop": (~every, ~every)}
    return _recompute_outputs(golden, release, keep, keep["drop"], output)


def _recompute_outputs(
    golden: Golden,
    release: Release,
    keep: Mapping[str, Keep],
    drop_all: Keep,
    output: Callable[[str, Keep, Any], Any],
) -> Recomputed:
    """Recompute `out/TEXT_OPTION`. OPTION selects what is kept, is `selfcond_none`, or `csX`: guidance with scale X.

    `output` computes the network for the text encodings named TEXT; None if it does not know them.
    """
    values: dict[str, Any] = {}
    for name in golden.below("out/"):
        which, _, option = name.partition("_")
        scale = re.fullmatch(r"cs([0-9.]+)", option)
        if option not in (*keep, "selfcond_none") and scale is None:
            continue
        known = None if option == "selfcond_none" else golden.arrays.get("in/self_cond")
        value = output(which, keep.get(option, keep[""]), known)
        if scale is not None and value is not None:
            null = output(which, drop_all, known)
            value = null + (value - null) * float(scale[1])
        if value is not None:
            values[f"out/{name}"] = value
    return Recomputed(values=values, notes=[f"network of DALLE2-pytorch {release.version}, family {release.family}"])


def recompute_network_parts(golden: Golden) -> Recomputed:
    cfg, params = load_model(golden, golden.settings)
    values: dict[str, Any] = {"time/out": time_tokens(params, jnp.asarray(golden.get("time/in")), cfg)}
    inputs = frozenset(name for name in golden.arrays if name.endswith("/in"))
    x = jnp.asarray(golden.get("transformer/in"))
    n_row, n_token, _ = x.shape
    past = net.no_text(params, n_row, cfg)
    values["rel_pos_bias/out"] = layers.position_bias(params.bias, 0, n_token)

    @jax.jit
    def attention_and_output(x: Any, i: Any) -> tuple[Any, Any]:
        """Return the attention part of a layer, and the layer's output, for the input in the file."""
        p = jax.tree.map(lambda w: w[i], params.layers)
        out, _, _ = net.layer(x, p, i, past.keys[i], past.values[i], params.bias, None, cfg)
        without_ffn = replace(p, w_back=jnp.zeros_like(p.w_back))
        mixed, _, _ = net.layer(x, without_ffn, i, past.keys[i], past.values[i], params.bias, None, cfg)
        return mixed - x, out

    for i in range(cfg.depth):
        mixed, _ = attention_and_output(jnp.asarray(golden.get(f"layer{i}.attn/in")), i)
        values[f"layer{i}.attn/out"] = mixed
        p = jax.tree.map(lambda w, i=i: w[i], params.layers)
        values[f"layer{i}.ff/out"] = layers.feed_forward(jnp.asarray(golden.get(f"layer{i}.ff/in")), p, cfg)
        x = attention_and_output(x, i)[1]
    assert params.out_gain is not None
    values["final_norm/out"] = layer_norm(jnp.asarray(golden.get("final_norm/in")), params.out_gain, cfg.last_norm)
    values["transformer/out"] = net.head(params, x, cfg)
    return Recomputed(values=values, inputs=inputs)


def recompute_losses(golden: Golden) -> Recomputed:
    """Recompute losses by type, target and text; then single options and gradients for the default settings."""
    settings, steps = settings_group(golden, "network"), golden.settings["timesteps"]
    image, text, encodings = (
        jnp.asarray(golden.get(f"in/{n}")) for n in ("image_embed", "text_embed", "text_encodings")
    )
    every = jnp.ones(len(image), bool)
    draws = Draws(
        times=jnp.asarray(golden.get("in/times")),
        noise=jnp.asarray(golden.get("in/noise")),
        keep_text=every,
        keep_image=every,
        self_conditioned=every,
        dropout=None,
    )
    values: dict[str, Any] = {}

    def model(weights: str = "params/", **more: Any) -> tuple[PriorConfig, Any]:
        return load_model(golden, {**settings, **more.pop("network", {})}, weights, timesteps=steps, **more)

    runs: dict[bool, Any] = {}

    def value(cfg: PriorConfig, params: Any, given: Any, drawn: Draws) -> Any:
        """Compute the loss in three parts, so that the network is compiled once for all types and targets; the gradient does not."""
        run = runs.setdefault(cfg.self_cond, _network(cfg))
        x0 = image * cfg.scale
        noised = schedule.q_sample(schedule.tables(cfg.schedule, cfg.timesteps), x0, drawn.times, drawn.noise)
        known = None
        if cfg.self_cond:
            first = run(params, noised, drawn.times, text, given, (every, every), jnp.zeros_like(noised), None)
            known = jnp.where(drawn.self_conditioned[:, None], first, 0.0)
        keep = (drawn.keep_text, drawn.keep_image)
        predicted = run(params, noised, drawn.times, text, given, keep, known, None)
        return jnp.mean(row_errors(predicted, x0, drawn, cfg))

    for name in golden.below("out/loss/"):
        first, *rest = name.split("/")
        if first == "opt":
            values[f"out/loss/{name}"] = _option_loss(golden, rest[0], model, value, encodings, draws)
        elif len(rest) == 2:
            cfg, params = model(loss=first, objective=rest[0])
            values[f"out/loss/{name}"] = value(cfg, params, encodings if rest[1] == "enc" else None, draws)
    cfg, params = model()
    values["out/image_embed_scale_default"] = cfg.scale
    if not golden.below("out/grad/"):
        return Recomputed(values=values)
    gradient = jax.grad(lambda p: loss(p, image, text, encodings, draws, cfg))

    def named(leaves: Any) -> dict[str, Any]:
        return {f"out/grad/{name}": x for name, x in to_reference(leaves, cfg).items() if not name.endswith(ROTARY)}

    return Recomputed(
        values={**values, **named(jax.jit(gradient)(params))},
        skipped={name: FREQUENCIES for name in golden.arrays if name.endswith(ROTARY)},
        in_float64=lambda: named(evaluate_in_float64(gradient, params)),
    )


def _option_loss(golden: Golden, name: str, model: Any, value: Any, encodings: Any, draws: Draws) -> Any:
    every = jnp.ones_like(draws.keep_text)
    if name.startswith("beta_"):
        return value(*model(schedule=name.removeprefix("beta_")), None, draws)
    if scale := re.fullmatch(r"image_embed_scale_([0-9.]+)", name):
        return value(*model(image_embed_scale=float(scale[1])), None, draws)
    if name == "training_clamp_l2norm":
        return value(*model(normalize_training=True), None, draws)
    if name == "cond_drop_masks":
        masks = (jnp.asarray(golden.get(f"in/{which}_keep_mask")) for which in ("text", "image"))
        return value(*model(), encodings, replace(draws, **dict(zip(("keep_text", "keep_image"), masks, strict=True))))
    if name in ("self_cond_used", "self_cond_unused"):
        cfg, params = model("sd_selfcond/", network={"self_cond": True})
        return value(cfg, params, None, replace(draws, self_conditioned=every if name.endswith("_used") else ~every))
    raise UserError(f"{golden.path}: out/loss/opt/{name} is an unknown option. Fix: write the file without it.")
