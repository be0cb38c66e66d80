"""`ModelFamily`: everything that the rest of the package knows about a family of models, as data and pure functions.

`cfg` is the family's own config, `batch` a pytree of arrays with rows on the leading axis. What a family does not have is left at its
default: no buffers, no carry, no diagnostics, and None for a capability. Code outside of `models/` asks for capabilities, never for
a family's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jaxtyping import Array, Float, PRNGKeyArray

from linnet.core.pytree import pytree
from linnet.models.decoder import Decoder
from linnet.models.model_config import ModelConfig
from linnet.parallel.sharding import Axes, LogicalAxisRules


@pytree
class Aux:
    """Auxiliary outputs of the loss function."""

    metrics: dict[str, Array]  # scalars and per-unit rows, averaged over micro-batches
    statistics: Any  # inputs of the buffer update, merged over micro-batches
    carry: Any  # the state after the batch


@pytree
class Keys:
    """Random keys of one update: `update` is new for every update, `sequence` is constant within a sequence."""

    update: PRNGKeyArray
    sequence: PRNGKeyArray


class LossFunction(Protocol):
    def __call__(
        self, params: Any, buffers: Any, carry: Any, batch: Any, keys: Keys | None, first_row: Any, cfg: Any, /
    ) -> tuple[Float[Array, ""], Aux]:
        """Return the loss and its auxiliary outputs. Without keys dropout is off. `first_row`: index of the batch's first row in the
        global batch."""
        ...


Nats = Callable[[Any, Any, Any, Any, Any], tuple[Float[Array, "B T"], Any]]
"""`(params, buffers, carry, batch, cfg)`: -log p of every target (masked or not), and the carry after the batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingSampler:
    """The capability to predict image embeddings from texts, by a diffusion or any other iteration."""

    prepare: Callable[[Any, Any], Any]
    """`(params, cfg)`: the weights as `sample` needs them."""
    solver: Callable[..., Any]
    """`(cfg, n_step, name="ddim")`: the table of a solver with `n_step` steps."""
    sample: Callable[..., Float[Array, "B D"]]
    """`(params, text_embed, encodings, solver, keys, cfg, guidance=1.0)`: one embedding per row. A row depends only on its own text
    and key."""
    row_losses: Callable[[Any, Any, PRNGKeyArray, Any, Any], Float[Array, " B"]]
    """`(params, batch, key, first_row, cfg)`: the loss of every pair without dropped conditions, for evaluation."""


def _none(*given: Any) -> None:
    del given


def _as_given(cfg: Any) -> Any:
    return cfg


def _buffers_as_they_are(buffers: Any, statistics: Any, cfg: Any) -> Any:
    del statistics, cfg
    return buffers


def _empty_dict(*given: Any) -> dict[Any, Any]:
    del given
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    name: str
    config: type[ModelConfig]
    rules: LogicalAxisRules
    """Mapping from the model's logical axes to mesh axes: the family's only sharding table."""
    param_specs: Callable[[Any], Any]
    """`(cfg)`: the Specs of the weights."""
    loss: LossFunction
    flops_per_token: Callable[[Any], int]
    """`(cfg)`: FLOPs of a forward pass per token (per row for families without tokens). Training takes three times as many."""

    # Buffers: what learns without gradients, such as codebooks.
    buffer_specs: Callable[[Any], Any] = _none
    """`(cfg)`"""
    merge_statistics: Callable[[Any, Any], Any] = _none
    """`(a, b)`: statistics of two micro-batches together."""
    update_buffers: Callable[[Any, Any, Any], Any] = _buffers_as_they_are
    """`(buffers, statistics, cfg)`"""

    # The carry: the state between the updates of one sequence.
    empty_carry: Callable[[Any, int], Any] = _none
    """`(cfg, batch_size)`"""
    carry_axes: Callable[[Any], Axes | None] = _none
    """`(carry)`: the logical axes of the carry's leaves; one axis of each leaf is the batch."""

    diagnostics: Callable[[Any, Any, Any], dict[str, Any]] = _empty_dict
    """`(buffers, metrics, cfg)`: diagnostic metrics of the model's internals. Called only on steps that log them."""
    collapse_warnings: Callable[[dict[str, Any], float, Any], dict[int, str]] = _empty_dict
    """`(diagnostics, min_fraction, cfg)`: advice for the layers that use less than this fraction of their codes or experts, keyed by
    layer."""

    lora_targets: tuple[str, ...] = ()
    """Names of the matrices that LoRA adapts by default; empty: no adapters."""
    reading_config: Callable[[Any], Any] = _as_given
    """`(cfg)`: the config that evaluation computes with, for counting its FLOPs. The result does not depend on it."""
    decoder: Decoder | None = None
    """Incremental decoding of tokens, for generation and serving."""
    nats: Nats | None = None
    """Likelihood of tokens, for evaluation."""
    sampler: EmbeddingSampler | None = None
    """Prediction of image embeddings, for evaluation and sampling."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFamily(ModelFamily):
    """Family of language models over tokens: `batch` has inputs, targets, doc_ids and loss_mask, each B x T."""

    decoder: Decoder  # pyright: ignore[reportGeneralTypeIssues]  # by keyword, so it needs no default
    nats: Nats  # pyright: ignore[reportGeneralTypeIssues]
