"""What an encoder must offer, and finding one by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Shaped

from linnet.errors import refuse


class Encoder(Protocol):
    """Captions and pictures to unit vectors of one space."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Of its weights, or of what names them: vectors of another encoder must not be mixed with its own."""
        ...

    def decode(self, encoded: bytes) -> Shaped[np.ndarray, ...]:
        """A picture as its network reads it; `BrokenPicture` where the bytes are none."""
        ...

    def embed_images(self, pictures: Shaped[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n D"]: ...
    def embed_texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]: ...


def open_encoder(name: str) -> Encoder:
    """`builtin`, or `open_clip:MODEL/WEIGHTS`."""
    if name == "builtin":
        from linnet.data.encoders.builtin import open_builtin

        return open_builtin()
    kind, _, model = name.partition(":")
    if kind == "open_clip" and model:
        from linnet.data.encoders.open_clip import OpenClip

        return OpenClip(model)
    raise refuse(
        "--encoder", name, "builtin or open_clip:MODEL/WEIGHTS", "use builtin, or open_clip:ViT-B-32/laion2b_s34b_b79k"
    )
