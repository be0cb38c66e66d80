"""What a family of models gives to the trainer and the engine: data and pure functions, nothing else."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, PRNGKeyArray

from linnet.core.pytree import pytree
from linnet.models.generate import Decoder
from linnet.parallel.sharding import LogicalAxisRules


@pytree
class Aux:
    """What a loss tells besides its value."""

    metrics: dict[str, Array]  # scalars and per-unit rows, averaged over micro-batches
    statistics: Any  # what the buffers learn from, merged over micro-batches
    carry: Any  # the state after the batch


@pytree
class Keys:
    """The randomness of one update: drawn anew for every update, or held for a whole sequence."""

    update: PRNGKeyArray
    sequence: PRNGKeyArray


class ModelFamily(Protocol):
    """What the trainer needs. `cfg` is the family's own config, `batch` a tree of arrays with rows in front."""

    name: str
    RULES: LogicalAxisRules
    """Which axes of a mesh cut which axes of the model: the one table of the family."""

    def param_specs(self, cfg: Any) -> Any: ...

    def buffer_specs(self, cfg: Any) -> Any: ...

    def empty_carry(self, cfg: Any, batch_size: int) -> Any: ...

    def carry_axes(self, carry: Any) -> Any:
        """What each axis of a carry's leaves is; one of them is the batch's rows."""
        ...

    def loss(
        self, params: Any, buffers: Any, carry: Any, batch: Any, keys: Keys | None, first_row: Any, cfg: Any
    ) -> tuple[Float[Array, ""], Aux]:
        """Without keys nothing is dropped. `first_row`: where the batch's first row stands in the whole batch."""
        ...

    def merge_statistics(self, a: Any, b: Any) -> Any: ...

    def update_buffers(self, buffers: Any, statistics: Any, cfg: Any) -> Any: ...

    def diagnostics(self, buffers: Any, metrics: Any, cfg: Any) -> dict[str, Any]:
        """Figures about the model's insides; computed only on steps that log them."""
        ...

    def alarms(self, figures: dict[str, Any], least: float, cfg: Any) -> dict[int, str]:
        """Parts of the model that use less than this share of what they have (codes, experts), each with a word of advice."""
        ...

    def flops_per_token(self, cfg: Any) -> int:
        """Of a forward pass; training takes three times that. Of families that do not read tokens: per row."""
        ...


class TokenFamily(ModelFamily, Protocol):
    """A family that reads and writes tokens: `batch` has inputs, targets, doc_ids and loss_mask, each B x T."""

    @property
    def decoder(self) -> Decoder:
        """How it writes, token by token."""
        ...

    def nats(self, params: Any, buffers: Any, carry: Any, batch: Any, cfg: Any) -> tuple[Float[Array, "B T"], Any]:
        """-log p of every target (masked or not), and the carry after the batch: what evaluation needs."""
        ...
