"""The encoder protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Shaped


class EncodedTexts(NamedTuple):
    """Text embeddings and token encodings.

    Letters: n texts, L positions (`Encoder.text_len`), D width.
    """

    embeds: Float32[np.ndarray, "n D"]
    encodings: Float32[np.ndarray, "n L D"]
    """One vector per token; all zeros is padding."""


class Encoder(Protocol):
    """Maps captions and images to unit vectors of one space."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Hash of the weights, or of their name: vectors of different encoders must not be mixed."""
        ...

    def decode(self, encoded: bytes) -> Shaped[np.ndarray, ...]:
        """Decode an image to the network's input; raises `BrokenImage` if the bytes are not an image."""
        ...

    def embed_images(self, images: Shaped[np.ndarray, "n ..."]) -> Float32[np.ndarray, "n D"]: ...
    def embed_texts(self, texts: Sequence[str]) -> Float32[np.ndarray, "n D"]: ...

    @property
    def text_len(self) -> int:
        """Positions of a text's token encodings; 0 if the encoder has none that a prior can read."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the embeddings of `embed_texts` and the token encodings. Raises a `UserError` if `text_len` is 0."""
        ...


def encode_prompt(
    encoder: Encoder, text: str, *, with_encodings: bool
) -> tuple[Float32[np.ndarray, " D"], Float32[np.ndarray, "L D"] | None]:
    """Encode one prompt by itself, so that its bits do not depend on the other prompts of a request."""
    if not with_encodings:
        return encoder.embed_texts([text])[0], None
    encoded = encoder.encode_texts([text])
    return encoded.embeds[0], encoded.encodings[0]
