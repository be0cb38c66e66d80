"""Fine-tuning settings: the parent of a run, and low-rank adapters (LoRA)."""

from __future__ import annotations

import dataclasses

from linnet.core.errors import invalid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parent:
    """The weights from which a fine-tuned run was initialized. Recorded once; a resumed run does not read the parent again."""

    path: str
    """Absolute path of the parent run, import or file when the run was started."""
    step: int
    """Step of the checkpoint that was used; 0 for a file or imported weights."""
    fingerprint: str
    """SHA-256 over the names, dtypes, shapes and checksums of the weights."""
    optimizer: bool = False
    """Whether the optimizer state was loaded too."""
    adapters: int = 0
    """In an export: rank of the adapters that were merged into the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Rank of the low-rank adapters (LoRA) that `--from` trains instead of the weights. 0: full fine-tuning."""
    alpha: float | None = None
    """LoRA alpha: an adapter adds (alpha / rank) * down @ up to its matrix. None: twice the rank."""
    targets: tuple[str, ...] = ()
    """Matrices to adapt, by name or part of a name (w_q, layers/w_o, experts). Empty: the attention matrices (vq: w_q, w_kvg, w_r,
    w_res; moe: w_q, w_k, w_v, w_o)."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise invalid("lora.rank", self.rank, "0 or more", "use 8, or 0 to train the weights themselves")
        if self.alpha is not None and not self.alpha > 0:
            raise invalid("lora.alpha", self.alpha, "above 0, or none for twice the rank", "use None")
        if not self.rank and (self.alpha is not None or self.targets):
            given = "alpha" if self.alpha is not None else "targets"
            raise invalid("lora.rank", 0, f"above 0 where lora.{given} is set", "use --lora.rank 8")

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank
