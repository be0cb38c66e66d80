"""Settings of fine-tuning: where a run's weights came from, and low-rank adapters (LoRA)."""

from __future__ import annotations

import dataclasses

from linnet.core.errors import invalid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parent:
    """What a fine-tuned run started from. Recorded once; only the first start reads the parent itself."""

    path: str
    """Absolute path of the run, import or file at that time."""
    step: int
    """The checkpoint that was used; 0 for a file or imported weights."""
    fingerprint: str
    """Of the weights: SHA-256 over their names, types, shapes and checksums."""
    optimizer: bool = False
    """Whether the optimizer state was taken over as well."""
    adapters: int = 0
    """In an export: the rank of the adapters that were merged into the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Rank of the low-rank adapters that `--from` trains instead of the weights; 0: train the weights themselves."""
    alpha: float | None = None
    """An adapter adds (alpha / rank) * down @ up to its matrix; none: twice the rank."""
    targets: tuple[str, ...] = ()
    """Matrices to adapt, by name or by a part of it (w_q, layers/w_o, experts); none: those of attention (vq: w_q, w_kvg, w_r, w_res;
    moe: w_q, w_k, w_v, w_o)."""

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
