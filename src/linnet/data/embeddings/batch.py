"""A batch of text and image embeddings.

Letters: B rows, L text positions, T width of a text embedding, D width of an image embedding.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float32

from linnet.core.pytree import pytree


@pytree
class PairBatch:
    text_embed: Float32[Array | np.ndarray, "B T"]
    image_embed: Float32[Array | np.ndarray, "B D"]
    encodings: Float32[Array | np.ndarray, "B L T"] | None
    """One vector per text position; an all-zero vector is padding. None if the source has no token encodings."""
    mask: Float32[Array | np.ndarray, " B"]
    """0 for rows that only fill up the last batch of an evaluation; their vectors are zeros."""
