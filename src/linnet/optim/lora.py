"""Low-rank adapters (LoRA): a matrix W is replaced by W + scale * down @ up, with W frozen and not in the optimizer state.

The sum is computed before the model runs, so every family, mesh and decoder uses ordinary weights, and the trained weights are
exactly those that are exported and served. `up` starts at zero: step 0 is the base model. Letters: K inputs, N outputs, R rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from linnet.config.schema import RunConfig
from linnet.config.tuning import LoraConfig
from linnet.core.errors import invalid
from linnet.core.params import Spec, is_spec
from linnet.core.pytree import leaf_name, named_leaves, pytree, static
from linnet.models import registry
from linnet.models.base import ModelFamily


@pytree
class Adapter:
    down: Any  # *stack K R
    up: Any  # *stack R N
    scale: float = static()


def trainable_specs(family: ModelFamily, cfg: RunConfig) -> Any:
    """Return the Specs that the optimizer updates: all weights, or the adapters by the names of their matrices."""
    specs = family.param_specs(cfg.model)
    return adapter_specs(specs, cfg.lora, family) if cfg.lora.rank else specs


def adapter_specs(specs: Any, lora: LoraConfig, family: ModelFamily) -> dict[str, Adapter]:
    if not family.lora_targets:
        able = ", ".join(name for name in registry.names() if registry.get(name).lora_targets)
        raise invalid("lora.rank", lora.rank, f"0 with family {family.name!r}", f"adapters are for {able}")
    matrices = {name: spec for name, spec in named_leaves(specs, is_spec) if len(spec.layer_shape) == 2}
    chosen: dict[str, Spec] = {}
    for target in lora.targets or family.lora_targets:
        found = {name: spec for name, spec in matrices.items() if f"/{target}/" in f"/{name}/"}
        if not found:
            raise invalid(
                "lora.targets", target, f"(a part of) the name of a matrix: {', '.join(matrices)}", "use one of them"
            )
        chosen |= found
    for name, spec in chosen.items():
        if lora.rank > min(spec.layer_shape):
            needs = f"at most {min(spec.layer_shape)}, the smaller side of {name} {spec.layer_shape}"
            raise invalid("lora.rank", lora.rank, needs, f"use {min(8, *spec.layer_shape)}, or other --lora.targets")
    return {name: _of_matrix(chosen[name], lora) for name in matrices if name in chosen}


def _of_matrix(spec: Spec, lora: LoraConfig) -> Adapter:
    *stack, n_in, n_out = spec.shape
    *names, inputs, outputs = spec.axes
    return Adapter(
        down=Spec((*stack, n_in, lora.rank), (*names, inputs, None), "fan_in"),
        up=Spec((*stack, lora.rank, n_out), (*names, None, outputs), "zeros"),
        scale=lora.scale,
    )


def weights_of(params: Any, base: Any) -> Any:
    """Return the weights to run the model with: the trained ones, or the frozen base with the trained adapters merged in."""
    return params if base is None else merge(base, params)


def merge(base: Any, adapters: dict[str, Adapter]) -> Any:
    """Add the adapters to the base weights. Matrices without an adapter are unchanged."""

    def one(path: tuple[Any, ...], weight: Array) -> Array:
        adapter = adapters.get(leaf_name(path))
        return weight if adapter is None else weight + delta(adapter)

    return jax.tree_util.tree_map_with_path(one, base)


def merged_config(cfg: RunConfig) -> RunConfig:
    """Return the config of a run after its adapters are merged, without LoRA settings."""
    if not cfg.lora.rank:
        return cfg
    parent = None if cfg.parent is None else dataclasses.replace(cfg.parent, adapters=cfg.lora.rank)
    return dataclasses.replace(cfg, lora=LoraConfig(), parent=parent)


def delta(adapter: Adapter) -> Float[Array, "*L K N"]:
    return adapter.scale * jnp.matmul(adapter.down, adapter.up, precision="highest")
