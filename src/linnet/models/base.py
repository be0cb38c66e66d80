"""Interface between a model family and the trainer and engine: data and pure functions only."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, PRNGKeyArray

from linnet.core.pytree import pytree
from linnet.models.generate import Decoder
from linnet.parallel.sharding import LogicalAxisRules


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


class ModelFamily(Protocol):
    """Interface that the trainer needs. `cfg` is the family's own config, `batch` a pytree of arrays with rows on the leading axis."""

    name: str
    RULES: LogicalAxisRules
    """Mapping from the model's logical axes to mesh axes: the family's only sharding table."""

    def param_specs(self, cfg: Any) -> Any: ...

    def buffer_specs(self, cfg: Any) -> Any: ...

    def empty_carry(self, cfg: Any, batch_size: int) -> Any: ...

    def carry_axes(self, carry: Any) -> Any:
        """Return the logical axes of the carry's leaves; one axis of each leaf is the batch."""
        ...

    def loss(
        self, params: Any, buffers: Any, carry: Any, batch: Any, keys: Keys | None, first_row: Any, cfg: Any
    ) -> tuple[Float[Array, ""], Aux]:
        """Return the loss and its auxiliary outputs. Without keys dropout is off. `first_row`: index of the batch's first row in the
        global batch."""
        ...

    def merge_statistics(self, a: Any, b: Any) -> Any: ...

    def update_buffers(self, buffers: Any, statistics: Any, cfg: Any) -> Any: ...

    def diagnostics(self, buffers: Any, metrics: Any, cfg: Any) -> dict[str, Any]:
        """Return diagnostic metrics of the model's internals. Called only on steps that log them."""
        ...

    def alarms(self, figures: dict[str, Any], least: float, cfg: Any) -> dict[int, str]:
        """Return advice for parts of the model that use less than this fraction of their units (codes, experts), keyed by part."""
        ...

    def flops_per_token(self, cfg: Any) -> int:
        """Return the FLOPs of a forward pass per token (per row for families without tokens). Training takes three times as many."""
        ...


class TokenFamily(ModelFamily, Protocol):
    """Family of language models over tokens: `batch` has inputs, targets, doc_ids and loss_mask, each B x T."""

    @property
    def decoder(self) -> Decoder:
        """Incremental decoding for generation and serving."""
        ...

    def nats(self, params: Any, buffers: Any, carry: Any, batch: Any, cfg: Any) -> tuple[Float[Array, "B T"], Any]:
        """Return -log p of every target (masked or not), and the carry after the batch, for evaluation."""
        ...
