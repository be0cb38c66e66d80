"""Configuration of the toy family: a stack of minimal GRU layers over tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from linnet.core.special_tokens import EOS
from linnet.models.bos import BeginId
from linnet.models.model_config import TokenModelConfig
from linnet.nn.remat import Remat
from linnet.parallel.mesh import check_divides, check_no_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(TokenModelConfig):
    n_vocab: int = 259
    """Vocabulary size."""
    end_id: int = EOS
    """EOS id of the tokenizer, which ends a document."""
    begin_id: BeginId = dataclasses.field(default="end", repr=False)
    """BOS id, prepended to every sequence."""
    d_model: int = 32
    """Width of the hidden vectors."""
    n_layer: int = 2
    """Number of layers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations."""
    remat: Remat = "none"
    """Activations recomputed in the backward pass."""

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        check_divides("model.d_model", self.d_model, "fsdp", sizes)
        check_no_experts(sizes)
