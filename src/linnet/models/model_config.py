"""Base classes of model configs: what the settings of a run need to know about its model family, without loading JAX.

A family's config is a frozen dataclass derived from `TokenModelConfig` or `PairModelConfig`. The declarations here are not fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from linnet.core.errors import invalid
from linnet.models.bos import BeginId, bos_id, check_begin
from linnet.nn.remat import Remat
from linnet.parallel.mesh import check_no_experts

FFN_MULTIPLE = 8
DataKind = Literal["tokens", "pairs"]
"""What a family is trained on: sequences of tokens, or pairs of a text and an image embedding."""


class ModelConfig:
    __dataclass_fields__: ClassVar[
        dict[str, Any]
    ]  # every config class is a dataclass, which `dataclasses.replace` asks for
    READS: ClassVar[DataKind]
    FREE_WHEN_TUNED: ClassVar[frozenset[str]] = frozenset()
    """Settings that fine-tuning may change, because they do not change the weights or their meaning."""
    EXPORT_FORMATS: ClassVar[tuple[str, ...]] = ()
    """Formats of `linnet export`, besides safetensors."""
    REPORT_SECTIONS: ClassVar[tuple[str, ...]] = ()
    """Sections that the report of a run should have: keys of `linnet.report.language_model.NOTHING_MEASURED`."""
    KEEPS_FREED_MEMORY: ClassVar[bool] = False
    """Whether training is faster if the process does not return freed memory to the system."""
    dtype: Literal["float32", "bfloat16"]
    remat: Remat

    @classmethod
    def from_older(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert the JSON settings of earlier versions to the current fields."""
        return values

    def check_sizes(self, *names: str) -> None:
        """Raise an error unless these settings are at least 1."""
        for name in names:
            if getattr(self, name) < 1:
                fix = f"set --model.{name.replace('_', '-')}"
                raise invalid(f"model.{name}", getattr(self, name), "at least 1", fix)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raise an error if the mesh does not divide the model evenly."""
        check_no_experts(sizes)

    def check_run(self, data: Any, train: Any) -> None:
        """Raise an error if the settings of data and training do not fit the model."""

    @property
    def width(self) -> int:
        """Width of the hidden vectors."""
        raise NotImplementedError

    @property
    def n_block(self) -> int:
        """Number of layers, as the planner counts them."""
        raise NotImplementedError

    @property
    def routing(self) -> tuple[int, int] | None:
        """Number of experts, and experts per token; None without experts."""
        return None


class TokenModelConfig(ModelConfig):
    """Config of a model that reads and writes tokens."""

    READS: ClassVar[DataKind] = "tokens"
    READS_IN_ONE_UPDATE: ClassVar[bool] = False
    """Whether a training sequence is one update, because the model carries no state to the next one."""
    context: int | None = None
    """Maximum tokens of a sequence; None: unlimited."""
    n_vocab: int
    end_id: int
    begin_id: BeginId
    d_model: int
    n_layer: int

    def check_ids(self, *names: str) -> None:
        """Raise an error unless these settings, and the BOS id, are ids of the vocabulary."""
        for name in names:
            if not 0 <= getattr(self, name) < self.n_vocab:
                needs = f"an id below model.n_vocab ({self.n_vocab})"
                raise invalid(f"model.{name}", getattr(self, name), needs, "use the tokenizer's")
        check_begin(self.begin_id, self.n_vocab)

    def check_run(self, data: Any, train: Any) -> None:
        del train
        self.check_lengths(data.sequence_len, data.update_len)

    def check_lengths(self, sequence_len: int, update_len: int) -> None:
        """Raise an error if the model cannot be trained on sequences of this length in updates of that length."""

    @property
    def width(self) -> int:
        return self.d_model

    @property
    def n_block(self) -> int:
        return self.n_layer

    @property
    def bos_id(self) -> int | None:
        """BOS id prepended to every sequence; None: no BOS."""
        return bos_id(self.begin_id, self.end_id)

    @property
    def condition_width(self) -> int:
        """Width of the embedding that conditions a sequence; 0: unconditional."""
        return 0

    @property
    def can_guide(self) -> bool:
        """Whether the model was trained with its condition dropped at times, which classifier-free guidance needs."""
        return False

    @property
    def update_multiple(self) -> int:
        """Number of tokens of which an update must have a multiple."""
        return 1

    def for_single_tokens(self) -> TokenModelConfig:
        """Return the config by which the cost of decoding one token at a time is counted."""
        return self


class PairModelConfig(ModelConfig):
    """Config of a model that predicts image embeddings from text embeddings and, optionally, token encodings."""

    READS: ClassVar[DataKind] = "pairs"
    dim: int
    """Width of the image embedding."""
    text_dim: int | None
    text_encodings: bool
    max_text_len: int
    timesteps: int
    """Maximum number of sampling steps."""

    @property
    def width(self) -> int:
        return self.dim

    @property
    def d_text(self) -> int:
        """Width of the text embedding."""
        return self.dim if self.text_dim is None else self.text_dim

    @property
    def loss_name(self) -> str:
        """Name of the loss, for the metrics."""
        raise NotImplementedError

    @property
    def masks_text(self) -> bool:
        """Whether missing text is masked in attention, rather than replaced by learned vectors."""
        return False


def ffn_size(d_model: int, widening: float) -> int:
    """Return the hidden size of a gated feed-forward layer, computed as in Grok-1: 2/3 of `widening` times the width, because a gated
    layer has three matrices instead of two; rounded up."""
    size = int(widening * d_model) * 2 // 3
    return size + -size % FFN_MULTIPLE
